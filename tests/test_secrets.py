"""What people read of a run is text, what is written holds no secrets, and nothing can run what is read."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import eval as eval_module
from model.hf import export_run
from runs import read_run, redacted, start_wandb
from runs.settings import clear_errors
from tests.strangers import rewrite, sample
from tests.trained import REPOSITORY, TINY, command, measure


def test_names_are_text_in_the_report_and_in_an_exported_card(stranger, tmp_path):
    name = "<script>alert(1)</script> [x](http://x) $\\frac$ ````"
    rewrite(stranger, name=name, data__name="````\n# not a part of the settings\n````")
    measure(f"runs={stranger}", f"out={tmp_path / 'out'}")
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<script>") == 1  # ours, which sorts the tables
    report = json.loads((tmp_path / "out" / "extrapolation.json").read_text())
    report["rows"][0]["scored"] = "<img src=http://x> | more\n# cells"
    (stranger / "extrapolation.json").write_text(json.dumps(report | {"corpus": "![x](http://x)"}))
    export_run(stranger, tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    head, settings = card.split("## Settings\n")
    assert not re.search(r"(?<!\\)[<\[]", head.split("---", 2)[2])
    assert not re.search("^# cells", head, re.MULTILINE)
    fence = re.match(r"\n(`+)yaml\n", settings)[1]
    assert len(fence) > 4
    assert settings.rstrip().endswith(fence)
    assert settings.count(fence) == 2


def test_a_terminal_gets_no_escape_codes(stranger, tmp_path, monkeypatch, capsys):
    (stranger / "a\x1b[2J").symlink_to("/etc")
    with pytest.raises(Exception, match=r"a\\x1b\[2J is a link"), clear_errors():
        read_run(stranger)
    (stranger / "a\x1b[2J").unlink()
    with pytest.raises(Exception, match=r"^error: \\x1b\[2J$"), clear_errors():
        raise ValueError("\x1b[2J")
    monkeypatch.setattr(eval_module, "continuations", lambda *_, **__: iter([{0: 27}, {0: 93}, {0: 10}]))
    for terminal, shown in ((True, "\\x1b]\n"), (False, "\x1b]\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal, raising=False)
        capsys.readouterr()
        sample(stranger, tmp_path)
        assert capsys.readouterr().out.startswith(shown)


def test_no_secret_is_written_by_a_training_run(corpus, tmp_path, monkeypatch):
    """Neither from the environment, nor git's remote, nor the command line; wandb's binary files are searched too."""
    monkeypatch.setenv("WANDB_API_KEY", "c0ffee1" * 5 + "cafe1")
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "HARMLESS"):
        monkeypatch.setenv(name, f"canary-{name}")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    subprocess.run(
        [*git, "remote", "add", "origin", "https://canary-user:canary-pass@x.org/x"], cwd=tmp_path, check=True
    )
    settings = [word for word in TINY if not word.startswith("wandb")]
    words = ["wandb.mode=offline", "+hydra.job.env_set.FOO_TOKEN=canary-given", "wandb.tags=[a]"]
    done = command("train.py", *settings, *corpus, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix == ".wandb"]
    for path in files:
        assert not re.search(rb"canary-|c0ffee1", path.read_bytes()), path
    (folder,) = tmp_path.glob("outputs/*_rope_16_seed0")
    command_line = read_run(folder)[1]["command"]
    assert "FOO_TOKEN=***" in command_line
    assert "model.head_dim=8" in command_line


def test_a_run_of_wandb_has_its_place_whatever_the_run_says(stranger, tmp_path, caplog):
    """wandb makes folders by a run's id, and refuses one that leads elsewhere; training and measuring go on."""
    settings = OmegaConf.create({"mode": "offline", "project": "x"})
    for run_id in ("../../escape", "a/b", 5):
        start_wandb(settings, stranger, run_id).finish(failed=False)
    assert len([record for record in caplog.records if "wandb" in record.message]) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"stranger", "canary"}


def test_what_looks_like_a_secret_is_redacted_and_nothing_else(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "0123456789")
    monkeypatch.setenv("SHORT_TOKEN", "rope")
    for word, shown in {
        "data.path=https://me:pw@host/x?token=abc&b=1": "data.path=https://***@host/x?token=***&b=1",
        "x=0123456789y": "x=***y",
        "+hydra.job.env_set.MY_PASSWORD=p": "+hydra.job.env_set.MY_PASSWORD=***",
        "name=hf_" + "a" * 30: "name=***",
        "a\x1bb": "a\\x1bb",
    }.items():
        assert redacted([word]) == [shown]
    kept = ["pos=rope", "tokenizer=gpt2", "tokenizer.vocab_size=300", "tokens=20", f"data.revision={'c0ffee12' * 5}"]
    assert redacted(kept) == kept


def test_libraries_that_log_addresses_are_not_heard():
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        loggers = compose("train", overrides=["preset=cpu"], return_hydra_config=True).hydra.job_logging.loggers
    for name in ("httpx", "httpcore", "urllib3", "fsspec", "datasets"):
        assert loggers[name].level == "WARNING"
    assert loggers.huggingface_hub.propagate is False


def calls(path: Path):
    """(function's name, keywords) of each call in a file, and ("import", module) of each import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {key.arg: ast.unparse(key.value) for key in node.keywords}
        elif isinstance(node, ast.Import):
            yield from (("import", alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("import", f"{node.module}.{alias.name}") for alias in node.names)


FORBIDDEN = (
    r"(eval|exec|__import__|.*(import_module|instantiate|get_class|get_method|unsafe_load|full_load|yaml\.load))"
)
MODULES = r"(pickle|dill|cloudpickle|shelve|marshal|joblib|runpy)(\..*)?"


def test_nothing_in_the_program_can_run_what_it_reads():
    files = [path for path in REPOSITORY.rglob("*.py") if not {"tests", ".venv"} & set(path.parts)]
    assert len(files) > 40
    for path in files:
        for function, about in calls(path):
            if path == REPOSITORY / "model" / "__init__.py" and "import_module" in f"{function} {about}":
                continue  # of a name from its own table
            if function == "import":
                assert not re.fullmatch(MODULES, about), f"{path}: {about}"
                continue
            assert not re.fullmatch(FORBIDDEN, function), f"{path}: {function}"
            if function == "torch.load":
                assert about.get("weights_only") == "True", path
            if function in ("dcp.load", "torch.distributed.checkpoint.load"):  # its usual reader opens a pickle
                assert "HuggingFaceStorageReader" in about.get("storage_reader", ""), path
            assert not re.search("FileSystemReader|FsspecReader", function), path
            if function in ("np.load", "numpy.load"):
                assert about.get("allow_pickle") == "False", path
            assert about.get("trust_remote_code", "False") == "False", path
            assert about.get("shell", "False") == "False", path


def test_the_audit_fails_for_what_can_be_mended_and_says_where_it_saw_nothing():
    spec = importlib.util.spec_from_file_location("audit", REPOSITORY / ".ci" / "audit.py")
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    good = {"name": "a", "version": "1", "vulns": []}
    lost = {"name": "b", "skip_reason": "not found"}
    fixed, open_ = ({"id": "CVE-1", "fix_versions": versions} for versions in (["2"], []))

    def judged(*packages):
        return audit.judged(json.dumps({"dependencies": packages, "fixes": []}))

    assert judged(good) == (["pip-audit: 1 packages checked"], 0)
    assert judged(good, {**good, "vulns": [fixed]})[1] == 1
    lines, status = judged({**good, "vulns": [open_]}, lost)
    assert status == 0
    assert "not in its database: b" in lines[0]
    assert "CVE-1" in lines[1]
    for nothing in (judged(lost, lost), audit.judged("")):  # what pip-audit itself calls no known vulnerabilities
        assert nothing[1] == 0
        assert "SKIPPED" in nothing[0][0]
