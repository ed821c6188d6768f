"""A run folder from a stranger, unpacked and opened by every command: it runs nothing, and reaches nothing outside.

Each attack is really made. What it would change, make or read is a canary beside the folder; a command that would wait
for ever, or fill the memory, runs into a deadline and a limit.
"""

import json
import os
import pickle
import resource
import shutil
import signal
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

import data.corpora
from data import DataConfig
from model import load_run
from model.checkpoint import best_checkpoint, latest_checkpoint, load_state
from model.convert import convert_run
from model.hf import export_run, import_run
from runs import MetricsFile, check_source, from_source, latest_run, read_run, repeated_config, resumed_config
from runs.folder import run_dir
from tests.strangers import SECRET, rewrite, sample
from tests.trained import TINY, command, composed, measure, run


def repeat(folder, tmp, *words):
    words = ["device=cpu", *words]
    return repeated_config(composed(*TINY, f"repeat='{folder}'", *words), [f"repeat={folder}", *words])


COMMANDS = {
    "measure": lambda folder, tmp: measure(f"runs='{folder}'", f"out={tmp / 'out'}"),
    "sample": sample,
    "resume": lambda folder, tmp: run(folder, *TINY, "train.max_steps=6", resume=True),
    "repeat": repeat,
    "init_from": lambda folder, tmp: run(tmp / "new", *TINY, *FILES, f"init_from='{folder}'"),
    "export": lambda folder, tmp: export_run(folder, tmp / "exported"),
    "like": lambda folder, tmp: import_run("nowhere", tmp / "imported", like=folder),
    "convert": lambda folder, tmp: convert_run(folder, "interleaved", tmp / "converted"),
    "load_run": lambda folder, tmp: load_run(folder),
}
READ_THE_CONFIG = ["like", "measure", "sample", "resume", "repeat", "export"]
READ_THE_WEIGHTS = ["load_run", "measure", "sample", "resume", "init_from", "export", "convert"]
FILES: list[str] = []


def on_each(attacks, names):
    """Every attack on the first command and on one other, and every command attacked at least once."""
    attacks, names = list(attacks), list(names)
    pairs = [(attack, names[0]) for attack in attacks]
    pairs += [(attacks[i % len(attacks)], names[i % len(names)]) for i in range(max(len(attacks), len(names)))]
    return pytest.mark.parametrize(("attack", "name"), list(dict.fromkeys(pairs)))


@pytest.fixture(autouse=True)
def _files(corpus):
    FILES[:] = corpus


@contextmanager
def limits(seconds: float = 20.0, megabytes: int = 300):
    """TimeoutError after a while; AssertionError where the process has grown by more."""

    def late(*_):
        raise TimeoutError(f"took longer than {seconds} s")

    before, most = signal.signal(signal.SIGALRM, late), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < megabytes * 1024


def refused(name: str, folder: Path, words: str) -> None:
    """The command says one clear error, and the canary is as it was."""
    with limits(), pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        COMMANDS[name](folder, folder.parent)
    assert SECRET not in str(caught.value)
    assert (folder.parent / "canary").read_text() == SECRET
    assert {path.name for path in folder.parent.iterdir()} <= {folder.name, "canary", "twin", "new"}
    assert not [*folder.parent.glob("new/*")]


# ---- out of the folder ----------------------------------------------------------------------------------------------


def link(name, target="../canary"):
    def attack(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(target)

    return attack


def pipe(name):
    def attack(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return attack


def link_in_two_steps(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "extrapolation.txt").symlink_to("../../canary")
    (folder / "best.txt").symlink_to("deep/extrapolation.txt")


LEADING_OUT = {
    "the log is a link": (link("train.log"), "train.log is a link that leads out of it, to .*canary"),
    "metrics are a link to what is not there": (link("metrics.jsonl", "../new_canary"), "metrics.jsonl is a link"),
    "the report is a link": (link("extrapolation.json", "/etc/hostname"), "extrapolation.json is a link"),
    "checkpoint/ is a link": (link("checkpoint", "/tmp"), "checkpoint is a link|holds no checkpoint"),
    "weights are a link": (
        link("checkpoint/step_000009.safetensors", "/etc/hostname"),
        r"step_000009\.safetensors is a link",
    ),
    "the configuration is a link": (link("config.yaml"), "config.yaml is a link"),
    "a link to a link": (link_in_two_steps, "is a link that leads out of it"),
    "weights are a pipe": (pipe("checkpoint/step_000009.safetensors"), "is no file and no folder"),
    "the best is a pipe": (pipe("checkpoint/best.json"), "best.json is no file and no folder"),
    "the configuration is a pipe": (pipe("config.yaml"), r"no file and no folder|not a run folder"),
    "a pipe among them": (pipe("notes.txt"), "notes.txt is no file and no folder"),
}


@on_each(LEADING_OUT, ["load_run", *COMMANDS])
def test_what_leads_out_of_the_folder_is_refused_by_name(attack, name, stranger):
    make, words = LEADING_OUT[attack]
    make(stranger)
    refused(name, stranger, words)


def test_the_best_checkpoint_is_asked_for_with_the_same_care(stranger):
    pipe("checkpoint/best.json")(stranger)
    with limits(), pytest.raises(ValueError, match=r"best\.json is no file and no folder"):
        best_checkpoint(stranger)


def test_links_that_stay_inside_and_folders_reached_by_links_are_fine(stranger, tmp_path):
    (stranger / "best.safetensors").symlink_to(latest_checkpoint(stranger).relative_to(stranger))
    (tmp_path / "elsewhere").symlink_to(stranger)
    for name in ("measure", "sample", "convert", "load_run"):
        COMMANDS[name](tmp_path / "elsewhere", tmp_path)
    run(tmp_path / "elsewhere", *TINY, *FILES, "train.max_steps=5", resume=True)


def test_a_hard_link_is_not_written_to(stranger, tmp_path, monkeypatch):
    """Resuming appends to the log, also of a copy made with cp -al; a file that a killed process left is none."""
    config = stranger / "config.yaml"
    os.link(config, config.with_name(".config.yaml.1.tmp"))
    monkeypatch.chdir(tmp_path)
    assert run_dir(str(stranger), None, "x") == str(stranger)
    (stranger / "train.log").unlink(missing_ok=True)
    os.link(tmp_path / "canary", stranger / "train.log")
    assert Path(run_dir(str(stranger), None, "x")).parent == Path("outputs")
    shutil.rmtree("outputs")
    refused("resume", stranger, "train.log is a hard link")
    load_run(stranger)


def test_resuming_appends_to_no_file_outside(stranger, tmp_path):
    """By the command itself: Hydra opens train.log before any of its code runs."""
    link("train.log")(stranger)
    done = command("train.py", f"resume={stranger}", "wandb.mode=disabled", cwd=tmp_path)
    assert done.returncode == 1
    assert "train.log is a link that leads out of it" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "canary").read_text() == SECRET


def test_a_bad_folder_among_others_does_not_stop_the_search_for_the_latest(stranger, two_runs, tmp_path):
    shutil.copytree(two_runs / "rope", tmp_path / "good")
    link("checkpoint/step_000009.safetensors", "nothing")(stranger)
    os.utime(stranger / "checkpoint" / "step_000009.safetensors", (0, 0), follow_symlinks=False)
    for path in (stranger / "checkpoint").glob("step_00000[1-8]*"):
        path.unlink()
    assert latest_run(tmp_path) == tmp_path / "good"


# ---- config.yaml ----------------------------------------------------------------------------------------------------


def written(text):
    return lambda folder: (folder / "config.yaml").write_text(text.replace("CANARY", str(folder.parent / "made")))


def added(text):
    return lambda folder: (folder / "config.yaml").write_text((folder / "config.yaml").read_text() + text)


def huge(folder):
    with open(folder / "config.yaml", "r+b") as file:
        file.truncate(10 << 30)


LAUGHS = "a0: &a0 [ha, ha]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
CONFIGS = {
    "a tag that calls": written("name: !!python/object/apply:os.mkdir [CANARY]\n"),
    "a tag that makes": written("name: !!python/object/new:os.system ['touch CANARY']\n"),
    "aliases that multiply": added(LAUGHS),
    "10 GB": huge,
    "a number without end": added("a: 1" + ":59" * 300_000 + "\n"),
    "brackets without end": added("a: " + "[" * 100_000 + "\n"),
    "escape codes": lambda folder: rewrite(folder, name="\x1b]0;owned\x07"),
    "text from right to left": lambda folder: rewrite(folder, name="run\u202egnp.exe"),
}


@on_each(CONFIGS, READ_THE_CONFIG)
def test_a_configuration_is_text_and_no_longer_than_a_configuration(attack, name, stranger):
    CONFIGS[attack](stranger)
    refused(name, stranger, r"config\.yaml")


NOT_OURS = {
    "an environment variable": {"name": "${oc.env:THE_CANARY}"},
    "a resolver of ours": {"preset": "${machine:}"},
    "a resolver for code": {"seed": "${eval:1+1}"},
    "a key of Hydra": {"hydra": {"run": {"dir": "/tmp"}}},
    "a class in the scheme": {"pos___target_": "os.system"},
    "a class in the data": {"data___target_": "os.system"},
    "a class in the training": {"train___target_": "os.system"},
    "a server for wandb": {"wandb__base_url": "http://127.0.0.1:9"},
}


@on_each(NOT_OURS, ["measure", "resume", "repeat"])
def test_a_configuration_has_known_settings_and_plain_values_only(attack, name, stranger, monkeypatch):
    monkeypatch.setenv("THE_CANARY", SECRET)
    rewrite(stranger, **NOT_OURS[attack])
    if (attack, name) == ("a class in the scheme", "repeat"):  # the network's settings are checked a step later
        return
    refused(name, stranger, r"config\.yaml|_target_")


def test_an_interpolation_stays_one_in_what_is_exported(stranger, tmp_path, monkeypatch):
    monkeypatch.setenv("THE_CANARY", SECRET)
    rewrite(stranger, wandb__group="${oc.env:THE_CANARY}")
    export_run(stranger, tmp_path / "exported")
    convert_run(stranger, "interleaved", tmp_path / "converted")
    for folder in ("exported", "converted"):
        assert not [p for p in (tmp_path / folder).rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    with pytest.raises(ValueError, match="interpolations"):
        read_run(tmp_path / "converted")


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def header(**changes):
    """Of the newest weights: the model that their header describes, changed."""

    def attack(folder):
        path = latest_checkpoint(folder)
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        about = json.loads(raw[8 : 8 + size])
        config = json.loads(about["__metadata__"]["config"]) | changes
        about["__metadata__"]["config"] = config.pop("raw", None) or json.dumps(config)
        text = json.dumps(about).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])

    return attack


def claims(change, size=None):
    def attack(folder):
        path = latest_checkpoint(folder)
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        about = json.loads(raw[8:end])
        change(about)
        text = json.dumps(about).encode()
        path.write_bytes((size or len(text)).to_bytes(8, "little") + text + raw[end:])

    return attack


def one_tensor_of_a_terabyte(about):
    about["embedding.weight"] |= {"shape": [10**6, 10**6]}


def wide_and_empty(about):
    about["embedding.weight"] |= {"shape": [0, 2 * 10**9], "data_offsets": [0, 0]}


WEIGHTS = {
    "10^9 layers": header(n_layer=10**9),
    "10^12 tokens": header(vocab_size=10**12),
    "heads of 2·10^9": header(head_dim=2 * 10**9, width=None),
    "2·10^9 heads": header(n_head=2 * 10**9, n_kv_head=None, width=None),
    "a learned table of 10^12 rows": header(pos={"name": "learned"}, train_length=10**12, original_length=None),
    "10^12 buckets": header(pos={"name": "t5", "buckets": 10**12, "max_distance": 10**13}),
    "an unbounded length": header(train_length=10**400, original_length=10**400, scaling={"name": "ntk", "factor": 2}),
    "a class": header(pos={"name": "os.system"}),
    "brackets without end": header(raw="[" * 10**5),
    "a tensor of a terabyte": claims(one_tensor_of_a_terabyte),
    "an empty tensor, wide": claims(wide_and_empty),
    "a header of a terabyte": claims(lambda about: None, size=10**12),
}


@on_each(WEIGHTS, READ_THE_WEIGHTS)
def test_weights_take_no_more_memory_than_their_file(attack, name, stranger):
    WEIGHTS[attack](stranger)
    refused(name, stranger, r"step_000004\.safetensors|known names are|embedding\.weight|config\.yaml says")


class Evil:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def zipped(folder, path, compression):
    """torch's own format, but with compressed entries: 16 MB of zeros in less than one."""
    torch.save({"step": torch.zeros(1 << 22)}, folder / "plain.pt")
    with zipfile.ZipFile(folder / "plain.pt") as plain, zipfile.ZipFile(path, "w", compression) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    (folder / "plain.pt").unlink()


def nested(depth):
    value = ["ha"]
    for _ in range(depth):
        value = [value] * 9
    return value


STATES = {
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"step": Evil(os.mkdir, str(path.parents[2] / "made"))})),
    "a pickle in torch's format": lambda path: torch.save(
        {"step": Evil(os.mkdir, str(path.parents[2] / "made"))}, path
    ),
    "a pickle that calls eval": lambda path: torch.save({"step": Evil(eval, "1 / 0")}, path),
    "a gigabyte by a number": lambda path: torch.save({"step": Evil(bytearray, 1 << 30)}, path),
    "a tensor by a number": lambda path: torch.save({"step": Evil(torch.Tensor, 10**10)}, path),
    "one value as 10^12": lambda path: torch.save({"step": torch.zeros(1).expand(10**6, 10**6)}, path),
    "lists that multiply": lambda path: torch.save({"step": nested(30)}, path),
    "compressed": lambda path: zipped(path.parents[1], path, zipfile.ZIP_DEFLATED),
}


@pytest.mark.parametrize("attack", STATES)
def test_a_training_state_runs_nothing_and_takes_no_more_memory_than_its_file(attack, stranger):
    STATES[attack](latest_checkpoint(stranger).with_suffix(".pt"))
    with limits(), pytest.raises(ValueError, match=r"step_000004\.pt: not a whole training state"):
        load_state(latest_checkpoint(stranger))
    refused("resume", stranger, r"step_000004\.pt: not a whole training state")


def test_weights_that_are_a_pickle_are_not_opened(stranger):
    torch.save({"a": Evil(os.mkdir, str(stranger.parent / "made"))}, latest_checkpoint(stranger))
    for name in READ_THE_WEIGHTS:
        refused(name, stranger, r"step_000004\.safetensors: not a whole checkpoint")


def test_files_beside_the_checkpoint_are_not_read_whole_whatever_their_size(stranger):
    weights = latest_checkpoint(stranger)
    for path in (weights.with_suffix(".sha256"), weights.with_name("best.json"), stranger / "metrics.jsonl"):
        before = path.read_bytes() if path.exists() else None
        with open(path, "ab") as file:
            file.truncate(1 << 30)
        with limits():
            load_run(stranger)  # by the checkpoint before it
            if path.name == "metrics.jsonl":
                MetricsFile(path, lambda row: True).write({"step": 5})
                assert path.stat().st_size < 1e6
        path.unlink() if before is None else path.write_bytes(before)


# ---- data -----------------------------------------------------------------------------------------------------------


SOURCES = ["a file", "a pipe", "everything", "the hub", "a twin of the folder", "out of it", "a pattern out of it"]


@on_each(SOURCES, ["measure", "resume", "repeat"])
def test_data_that_only_a_run_names_are_not_read(attack, name, stranger, tmp_path, monkeypatch):
    (tmp_path / "canary").write_text(SECRET)
    monkeypatch.setattr(data.corpora, "_hub_rows", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.setattr(data.corpora, "_user_files", lambda *_: pytest.fail("looked for files"))
    (tmp_path / "twin").mkdir()
    os.mkfifo(tmp_path / "twin" / "pipe.txt")
    changes = {
        "a file": {"data__path": str(tmp_path / "canary")},
        "a pipe": {"data__path": [str(tmp_path / "twin" / "pipe.txt")]},
        "everything": {"data__path": "/**/*.txt"},
        "the hub": {"data__kind": "hub", "data__path": "owner/name"},
        "a twin of the folder": {"data__path": f"{stranger}*/x.txt"},
        "out of it": {"data__path": f"{stranger}/checkpoint/../../canary"},
        "a pattern out of it": {"data__path": f"{stranger}/check*/../../canary"},
    }
    rewrite(stranger, **changes[attack])
    refused(name, stranger, r"its config\.yaml names .*trust=true reads them.* (cache|data\.cache)=<folder>")


def test_trust_and_texts_in_the_folder_itself_are_read(stranger, tmp_path, two_runs):
    text = yaml.safe_load((stranger / "config.yaml").read_text())["data"]["path"]
    for place, words in ((stranger / "text.jsonl", []), (tmp_path / "outside.jsonl", ["trust=true"])):
        shutil.copy(text, place)
        rewrite(stranger, data__path=str(place), data__cache=str(tmp_path / "evil"))
        (result,) = measure(f"runs={stranger}", "lengths=[16]", f"out={tmp_path / 'out'}", *words)
        assert result["corpus"] == f"files ({place})"
        assert repeat(stranger, tmp_path, *words).data.cache != str(tmp_path / "evil")
    assert not (tmp_path / "evil").exists()  # its cache is never used
    stdlib = DataConfig(name="x", kind="stdlib", cache=str(tmp_path / "none"))
    check_source(stranger, stdlib, False, "cache")


def test_own_runs_need_no_trust_where_their_token_files_are(corpus, tmp_path, monkeypatch, caplog):
    """Whatever cache they are in, if the command names it; and where the text has changed since."""
    caplog.set_level("INFO", "ropewalk")
    shutil.copy(corpus[0].partition("=")[2], tmp_path / "text.jsonl")
    cache = tmp_path / "scratch"
    run(tmp_path / "run", *TINY, f"data.path={tmp_path / 'text.jsonl'}", f"data.cache={cache}")
    words = [f"runs={tmp_path / 'run'}", "lengths=[16]"]
    with pytest.raises(ValueError, match=r"nothing in ~/\.cache/ropewalk says that you have used them before"):
        measure(*words)
    caplog.clear()
    measure(*words, f"cache={cache}")
    assert "tokenising" not in caplog.text
    assert [*cache.glob("measurements/*.npy")]
    repeat(tmp_path / "run", tmp_path, f"data.cache={cache}")
    with open(tmp_path / "text.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    measure(*words, f"cache={cache}")
    assert "tokenising" in caplog.text


def test_weights_that_a_run_says_it_started_from_are_not_opened(stranger, tmp_path, two_runs):
    os.mkfifo(tmp_path / "pipe")
    rewrite(stranger, init_from=str(tmp_path / "pipe"), scaling={"name": "linear", "factor": 2.0})
    rewrite(stranger, model__original_length=None)
    with limits(), pytest.raises(ValueError, match=r"starts from the weights in .*pipe; trust=true"):
        repeat(stranger, tmp_path)
    config = resumed_config(composed(*TINY, f"resume='{stranger}'"), [f"resume={stranger}"])
    with limits():
        assert from_source(config).model.original_length is None
