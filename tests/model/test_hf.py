"""Folders for transformers and run folders made of its checkpoints: opened by it, measured and trained on by us."""

import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import tiktoken
import torch
import transformers
import yaml

import model.hf
from data import get_tokenizer
from model import load_run
from model.checkpoint import save_checkpoint
from model.hf import export_run, import_run, main, make_tokenizer
from tests.helpers import random_tokens, small_model

REPOSITORY = Path(__file__).parents[2]
TEXTS = [
    "",
    "Hello world",
    "tabs\tand\r\nlines\n\n   and trailing space ",
    "naïve Ünïcödé, 漢字, العربية, \U0001f469\u200d\U0001f4bb and e\u0301, \x85 and \x00, don't 12345",
    "x" * 1000,
]
TINY = [
    "preset=cpu", "data=files", "train.batch_size=4", "train.max_steps=4", "train.warmup_steps=2",
    "train.eval_every=4", "train.checkpoint_every=4", "val.max_windows=8", "precision=fp32", "device=cpu",
    "wandb.mode=disabled",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path_factory):
    def refuse(*args, **kwargs):
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # tiktoken keeps what it has once loaded
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path_factory.mktemp("vocabulary")))


def run_folder(folder: Path, pos: dict, tokenizer: str = "bytes", vocab_size: int = 257, **settings):
    """A run of step 40 as far as export and import read it."""
    trained = small_model(pos, torch.float32, vocab_size=vocab_size, **settings)
    save_checkpoint(folder, 40, trained.config, trained.state_dict(), {})
    size = None if vocab_size in (257, 50257) else vocab_size
    written = {"name": folder.name, "tokenizer": {"name": tokenizer, "vocab_size": size}}
    (folder / "config.yaml").write_text(yaml.safe_dump(written))
    return trained


def tiny_gpt2(folder: Path, vocab_size: int = 257, **settings):
    """With the tokenizer `bytes` or `gpt2`."""
    torch.manual_seed(0)
    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, **settings}
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocab_size, **shape)).eval()
    made.save_pretrained(folder)
    make_tokenizer(get_tokenizer("bytes" if vocab_size == 257 else "gpt2")).save_pretrained(folder)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def command(*words, script: tuple = ("-m", "model.hf")) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *script, *map(str, words)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


# ---- out ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_folder_is_opened_without_our_code(tmp_path):
    trained, out = run_folder(tmp_path / "run", {"name": "rope"}, n_kv_head=2), tmp_path / "out"
    done = command("export", tmp_path / "run", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {out}: Starcoder2ForCausalLM of transformers")
    assert "with a tokenizer; on 64 random tokens the logits differ by at most" in done.stdout
    opened = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokens = tokenizer("def f(x):", return_tensors="pt").input_ids
made = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(made.generate(tokens, max_new_tokens=90, do_sample=False, eos_token_id=None)[0].tolist())
"""
    done = subprocess.run([sys.executable, "-I", "-c", opened, out], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = trained.generate(torch.tensor([list(b"def f(x):")]), 90)[0].tolist()  # three times the training length
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_the_card_has_the_settings_and_the_measured_numbers_go_along(tmp_path):
    run_folder(tmp_path / "run", {"name": "rope"}, scaling={"name": "dynamic", "factor": 2.0})
    said = export_run(tmp_path / "run", tmp_path / "a")
    card = (tmp_path / "a" / "README.md").read_text()
    assert said.partition(": ")[2] in card
    assert (tmp_path / "run" / "config.yaml").read_text() in card
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert not opened.generation_config.use_cache
    assert not (tmp_path / "a" / "extrapolation.json").exists()
    (tmp_path / "run" / "extrapolation.json").write_text("{}")
    export_run(tmp_path / "run", tmp_path / "b")
    assert (tmp_path / "b" / "extrapolation.json").read_text() == "{}"


def test_wrong_logits_are_not_written(tmp_path, monkeypatch):
    run_folder(tmp_path / "run", {"name": "rope"})

    def damaged(*args):
        exported = to_transformers(*args)
        exported.model.layers[1].mlp.act = torch.nn.GELU()  # not its tanh approximation: a difference of about 1e-3
        return exported

    to_transformers = model.hf.to_transformers
    monkeypatch.setattr(model.hf, "to_transformers", damaged)
    with pytest.raises(ValueError, match=r"on 64 random tokens the logits differ by at most .*not written"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert names(tmp_path) == ["run"]


# ---- tokenizers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "pos"), [("bytes", None, "learned"), ("gpt2", None, "learned"), ("gpt2", 1024, "rope")]
)
def test_autotokenizer_gives_the_ids_that_the_run_was_trained_on(name, size, pos, tmp_path):
    ours = get_tokenizer(name, size)
    run_folder(tmp_path / "run", {"name": pos}, name, ours.vocab_size)
    assert "with a tokenizer" in export_run(tmp_path / "run", tmp_path / "out")
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text, expected in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert opened.encode(text) == expected
        assert opened.decode(expected) == text
    assert len(opened) == ours.vocab_size
    assert opened.eos_token_id == opened.bos_token_id == ours.end_of_document
    assert opened.encode("a<|endoftext|>")[-1] == ours.end_of_document
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == ours.end_of_document
    import_run(str(tmp_path / "out"), tmp_path / "back", tmp_path / "run")
    expected = {"name": name} | ({"vocab_size": size} if size else {})
    assert yaml.safe_load((tmp_path / "back" / "config.yaml").read_text())["tokenizer"] == expected


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [("gpt2", 1024, "TIKTOKEN_CACHE_DIR"), ("nowhere/model", 300, "nowhere"), ("bytes", 300, "cut")],
)
def test_without_a_vocabulary_the_weights_are_written_and_the_command_says_so(
    name, size, reason, tmp_path, monkeypatch
):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    run_folder(tmp_path / "run", {"name": "learned"}, name, size)
    said = export_run(tmp_path / "run", tmp_path / "out")
    assert "without a tokenizer" in said
    assert reason in said
    assert said.partition(": ")[2] in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id is None


# ---- in -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_an_exported_run_comes_back_measures_the_same_and_is_trained_on(pos, tmp_path, corpus):
    shape = ["model.n_layer=1", "model.n_head=2", "model.head_dim=8", "model.train_length=16"]
    run, back = tmp_path / pos, tmp_path / "back"
    train = ["train.py", *TINY, *corpus]
    assert command(*shape, f"pos={pos}", f"hydra.run.dir={run}", script=train).returncode == 0
    export_run(run, tmp_path / "hf")
    assert import_run(str(tmp_path / "hf"), back, run).endswith(f"measure it: python eval.py runs={back}")
    rows = []
    for folder in (run, back):
        words = [f"runs=[{folder}]", "lengths=[16]", "max_windows=8", "wandb.mode=disabled", "device=cpu"]
        words += [corpus[1].removeprefix("data.")]
        done = command(*words, script=["eval.py"])
        assert done.returncode == 0, done.stderr
        document = json.loads((folder / "extrapolation.json").read_text())
        rows.append(document.get("results", [document])[0]["rows"][0])
    assert rows[0]["nll"] == pytest.approx(rows[1]["nll"], abs=1e-5)
    done = command(*shape, f"pos={pos}", f"init_from={back}", f"hydra.run.dir={tmp_path / 'on'}", script=train)
    assert done.returncode == 0, done.stderr
    assert load_run(tmp_path / "on").config == load_run(back).config


def test_an_imported_run_has_the_logits_and_settings_of_its_source(tmp_path):
    made = tiny_gpt2(tmp_path / "hf", 50257)
    run_folder(tmp_path / "like", {"name": "none"})
    said = import_run(str(tmp_path / "hf"), tmp_path / "run", tmp_path / "like")
    head = f"wrote {tmp_path / 'run'}: GPT2LMHeadModel as pos=learned; on 16 random tokens the logits differ by at most"
    assert said.startswith(head)
    ours = load_run(tmp_path / "run")
    tokens = random_tokens(ours, 2, 16)
    with torch.inference_mode():
        assert (ours(tokens) - made(tokens).logits).abs().max() < 1e-5
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (settings["name"], settings["init_from"]) == ("run", str(tmp_path / "hf"))
    assert settings["tokenizer"] == {"name": "gpt2"}
    assert settings["provenance"]["wandb_id"] is None


def test_settings_of_an_imported_run_are_read_by_train_and_eval(tmp_path, two_runs):
    from runs.folder import read_run

    tiny_gpt2(tmp_path / "hf")
    import_run(str(tmp_path / "hf"), tmp_path / "run", two_runs / "rope")
    settings, origin = read_run(tmp_path / "run")
    assert (origin["fingerprint"], settings.wandb.mode) == ("unknown", "disabled")
    config = load_run(tmp_path / "run").config
    assert {**settings.model, "vocab_size": 257, "pos": settings.pos, "scaling": None} == vars(config)


def test_a_model_with_another_tokenizer_is_not_measured_with_ours(tmp_path):
    run_folder(tmp_path / "like", {"name": "none"})
    tiny_gpt2(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    said = import_run(str(tmp_path / "hf"), tmp_path / "run", tmp_path / "like")
    assert said.endswith("measure it: only with load_run, in Python: its tokenizer is none of ours")
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings["tokenizer"] == {"name": str(tmp_path / "hf")}


def test_code_beside_the_weights_and_pickled_weights_are_not_read(tmp_path):
    made = tiny_gpt2(tmp_path / "hf")
    run_folder(tmp_path / "like", {"name": "none"})
    (tmp_path / "hf" / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    path = tmp_path / "hf" / "config.json"
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto}))
    import_run(str(tmp_path / "hf"), tmp_path / "run", tmp_path / "like")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(made.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        import_run(str(tmp_path / "hf"), tmp_path / "other", tmp_path / "like")
    assert names(tmp_path) == ["hf", "like", "run"]


@pytest.mark.parametrize("what", ["missing", "unexpected"])
def test_weights_that_are_not_the_model_s_are_refused(what, tmp_path):
    made = tiny_gpt2(tmp_path / "hf")
    run_folder(tmp_path / "like", {"name": "none"})
    state = {key: value.clone() for key, value in made.state_dict().items() if key != "lm_head.weight"}
    if what == "missing":
        del state["transformer.h.1.mlp.c_fc.weight"]
    else:
        state["transformer.h.2.mlp.c_fc.weight"] = torch.zeros(3)
    made.save_pretrained(tmp_path / "hf", state_dict=state)
    with pytest.raises(ValueError, match=r"hf: missing or unexpected weights: .*mlp\.c_fc\.weight"):
        import_run(str(tmp_path / "hf"), tmp_path / "run", tmp_path / "like")
    assert names(tmp_path) == ["hf", "like"]


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_what_a_user_can_mend_is_named(tmp_path, capsys):
    run_folder(tmp_path / "run", {"name": "rope"})
    run_folder(tmp_path / "alibi", {"name": "alibi"})
    run_folder(tmp_path / "bare", {"name": "rope"})
    (tmp_path / "bare" / "config.yaml").unlink()
    tiny_gpt2(tmp_path / "hf", activation_function="relu")
    before, out, like = names(tmp_path), tmp_path / "out", tmp_path / "run"
    for words, expected in (
        ([], "usage: python -m model.hf"),
        (["export", tmp_path / "run"], "required: out"),
        (["export", tmp_path / "run", tmp_path / "hf"], "hf: exists already"),
        (["export", tmp_path / "nowhere", out], "nowhere: no such run folder"),
        (["export", tmp_path / "hf", out], "hf: no such run folder, or it holds no checkpoint"),
        (["export", tmp_path / "bare", out], "bare/config.yaml"),
        (["export", tmp_path / "alibi", out], "pos=alibi: has no exact equal to export to"),
        (["import", tmp_path / "hf", out], "required: like"),
        (["import", tmp_path / "hf", tmp_path / "run", like], "run: exists already"),
        (["import", tmp_path / "hf", out, like], "activation_function='relu': ours has gelu_pytorch_tanh"),
        (["import", tmp_path / "nowhere", out, like], "nowhere"),
        (["import", "nobody/nothing-at-all", out, like], "huggingface.co"),
        (["import", tmp_path / "hf", out, tmp_path / "nowhere"], "nowhere/config.yaml"),
    ):
        with pytest.raises(SystemExit) as exited:
            main([str(word) for word in words])
        assert exited.value.code == 2
        said, error = capsys.readouterr()
        assert said == ""
        assert expected in error
        assert names(tmp_path) == before, words


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"error: .*transformers.*`pip install -e '.\[hf\]'` brings it"):
        importlib.reload(model.hf)
