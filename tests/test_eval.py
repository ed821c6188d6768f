"""eval.py on trained runs: what it measures, shows, keeps and refuses."""

import copy
import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import eval as eval_module
import runs.trained
from data import get_tokenizer
from eval import default_lengths
from measure import results, store
from model import GPT
from model.checkpoint import mark_best
from runs import Ranks
from tests.trained import TINY, composed, measure, metrics, run


def test_evaluation_takes_the_latest_run_and_agrees_with_training(corpus, tmp_path, capsys):
    for pos in ("learned", "rope"):
        run(tmp_path / pos, *TINY, *corpus, f"pos={pos}")
    trained = json.loads((tmp_path / "rope" / "extrapolation.json").read_text())
    capsys.readouterr()
    (result,) = measure(f"root={tmp_path}", "max_targets=64", "precision=fp32")
    assert result["pos"]["name"] == "rope"
    assert result["rows"] == trained["rows"]
    assert trained.keys() | {"by_position"} == result.keys()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sliding windows"
    assert lines[1].split() == ["length", "perplexity", "bits/byte", "÷", "at", "16", "[95", "%]", "scored"]
    assert [line.split()[0] for line in lines[2:]] == ["16", "20", "24", "32", "64"]


def test_evaluation_of_two_runs_side_by_side(two_runs, capsys):
    results = measure(f"runs=[{two_runs / 'learned'},{two_runs / 'rope'}]", f"root={two_runs}", "lengths=[16,32]")
    assert [row["perplexity"] is None for row in results[0]["rows"]] == [False, True]
    assert results[0]["rows"][0]["scored"] == results[1]["rows"][0]["scored"]  # the same tokens
    assert "table ends at 16" in capsys.readouterr().out
    (comparison,) = two_runs.glob("*_comparison")
    whole = json.loads((comparison / "extrapolation.json").read_text())
    assert [result["run"] for result in whole["results"]] == ["learned_16_seed0", "rope_16_seed0"]
    assert [(pair["model"], pair["length"]) for pair in whole["paired"]] == [("rope_16_seed0", 16)]
    assert (comparison / "extrapolation.png").stat().st_size > 5000
    assert json.loads((two_runs / "learned" / "extrapolation.json").read_text())["rows"][1]["perplexity"] is None
    shutil.rmtree(comparison)


def test_evaluation_on_other_data_says_so(two_runs, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(two_runs / "rope", copy)
    config = OmegaConf.load(copy / "config.yaml")
    config.provenance.fingerprint = "another"
    OmegaConf.save(config, copy / "config.yaml")
    measure(f"runs={copy}")
    assert "was trained on data another" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["runs=[]"], r"runs=\[\]"),
        (["runs=nowhere"], "nowhere: not a run folder"),
        (["root=nowhere"], "no run with a checkpoint under nowhere"),
        (["lengths=[]"], r"lengths=\[\]"),
        (["lengths=[100000]"], "do not fit into"),
        (["stride=17"], "stride=17"),
        (["stride=0"], "stride=0"),
        (["protocol=slide"], "sliding, nonoverlapping or both"),
        (["max_targets=0"], "max_targets=0"),
        (["device=tpu"], "device='tpu'"),
        (["precision=fp8"], "precision='fp8'"),
        (["wandb.mode=loud"], "'loud'"),
        (["out=pyproject.toml"], r"out=pyproject\.toml: pyproject\.toml is a file"),
        (["out=pyproject.toml/x"], r"pyproject\.toml is a file"),
        (["runs=5"], "runs=5: must be a run folder"),
        (["runs=''"], "runs=: must be a run folder"),
        (["documents=inside"], "documents='inside': use within or across"),
        (["documents=within", "lengths=[16,5000]"], "do not fit into"),
        (["documents=within", "lengths=[16,200]"], "no document holds a window of 200 .*the longest has"),
        (["scalings=[yarm]"], "scalings='yarm': known names are none, linear"),
        (["scalings=[]"], r"scalings=\[\]"),
        (["scalings=[none]", "scaling=yarn"], "scaling= and scalings= together"),
        (["scalings=[longrope]"], "scaling.*short"),
        (["runs=[learned]", "scalings=[yarn]"], "none of them fits .*no frequencies to scale"),
        (["sort=17"], "sort='17': the columns are model, 16, 20"),
        (["reference=alibi"], "reference='alibi': the models are rope_16_seed0"),
        (["runs='nothing*'"], r"runs=nothing\*: no run folder matches"),
    ],
    ids=str,
)
def test_evaluation_refuses_and_writes_nothing(settings, words, two_runs):
    before = {path: path.stat().st_mtime_ns for path in two_runs.rglob("*")}
    settings = [setting.replace("[learned]", f"[{two_runs / 'learned'}]") for setting in settings]
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        measure(f"root={two_runs}", *settings)
    assert {path: path.stat().st_mtime_ns for path in two_runs.rglob("*")} == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "holds no checkpoint"),
        ("cut short", r"step_\d+\.safetensors: is damaged"),
        ("not one at all", r"step_\d+\.safetensors: not a whole checkpoint"),
        ("of another model", r"step_\d+\.safetensors: not a whole checkpoint"),
    ],
)
def test_a_run_without_a_whole_checkpoint_is_named_before_anything_is_measured(damage, words, two_runs, tmp_path):
    shutil.copytree(two_runs / "rope", tmp_path / "copy")
    paths = sorted((tmp_path / "copy" / "checkpoint").glob("*.safetensors"))
    for path in paths:
        if damage != "cut short":
            path.with_suffix(".sha256").unlink()  # else it is known that they are not what was written
        if damage == "missing":
            path.unlink()
        elif damage == "cut short":
            path.write_bytes(path.read_bytes()[:-100])
        elif damage == "not one at all":
            path.write_bytes(b"weights")
        else:
            header = path.read_bytes()
            size = int.from_bytes(header[:8], "little")
            path.write_bytes(header[: 8 + size].replace(b"blocks.0", b"blocks.1") + header[8 + size :])
    out = tmp_path / "out"
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        measure(f"runs=[{two_runs / 'learned'},{tmp_path / 'copy'}]", f"out={out}")
    assert not out.exists()


def test_of_a_damaged_last_checkpoint_the_one_before_is_measured(two_runs, tmp_path, caplog):
    shutil.copytree(two_runs / "rope", tmp_path / "copy")
    (path,) = (tmp_path / "copy" / "checkpoint").glob("step_000004.safetensors")
    path.write_bytes(path.read_bytes()[:-4] + b"ABCD")
    (result,) = measure(f"runs={tmp_path / 'copy'}", "lengths=[16]")
    assert result["checkpoint"] == "step_000002"
    assert "step_000004.safetensors: is damaged" in caplog.text


def test_a_run_that_was_not_trained_to_its_end_is_named(two_runs, tmp_path, caplog):
    shutil.copytree(two_runs / "rope", copied := tmp_path / "copy")
    measure(f"runs={copied}", "lengths=[16]")
    assert "not trained to its end" not in caplog.text
    config = copied / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: 4\n", "max_steps: 9\n"))
    measure(f"runs={copied}", "lengths=[16]")
    assert "step 4 of 9, not trained to its end" in caplog.text


@pytest.mark.parametrize("change", [{"pos": {"name": "none"}}, {"model": {"train_length": 99}}, {"scaling": {"a": 1}}])
def test_a_config_that_is_not_of_its_checkpoint_is_refused(change, two_runs, tmp_path):
    shutil.copytree(two_runs / "rope", tmp_path / "copy")
    path = tmp_path / "copy" / "config.yaml"
    config = OmegaConf.load(path)
    config.pos = change.get("pos", config.pos)
    OmegaConf.save(OmegaConf.merge(config, {key: value for key, value in change.items() if key != "pos"}), path)
    with pytest.raises(ValueError, match=r"copy: config\.yaml says|scaling"):
        measure(f"runs={tmp_path / 'copy'}", f"out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_names_that_are_equal_are_told_apart(two_runs, tmp_path):
    for place in ("p", "q"):
        shutil.copytree(two_runs / "rope", tmp_path / place / "run")
    yarns = "scalings=[null,none,yarn,yarn,{name: yarn, beta_fast: 8}]"
    found = measure(f"runs=[{tmp_path / 'p' / 'run'},{tmp_path / 'q' / 'run'}]", yarns, f"out={tmp_path / 'out'}")
    names = [result["run"] for result in found]
    assert len(set(names)) == len(names) == 6  # none is what they were trained with, and the second yarn is the first
    assert names[2].endswith(" yarn beta_fast=8")
    labels = [group["model"] for group in json.loads((tmp_path / "out" / "extrapolation.json").read_text())["groups"]]
    assert labels == names


def test_a_grid_measures_what_makes_sense_and_says_what_it_leaves_out(two_runs, tmp_path, caplog):
    caplog.set_level("INFO", "ropewalk")
    folders = f"runs=[{two_runs / 'learned'},{two_runs / 'rope'}]"
    results = measure(folders, "scalings=[none,ntk,yarn]", "protocol=both", "lengths=[16,32]", f"out={tmp_path}")
    names = [
        f"{name}_16_seed0 {scaling}"
        for name, *of_name in (("learned", "none"), ("rope", "none", "ntk", "yarn"))
        for scaling in of_name
    ]
    assert [result["run"] for result in results] == [name for name in names for _ in range(2)]
    assert [result["protocol"] for result in results[:2]] == ["sliding", "nonoverlapping"]
    assert "left out learned_16_seed0 ntk: pos=learned has no frequencies to scale" in caplog.messages
    whole = json.loads((tmp_path / "extrapolation.json").read_text())
    assert len(whole["skipped"]) == 2
    # each is what measuring it by itself gives
    for scaling, result in zip(("none", "ntk", "yarn"), results[2::2], strict=True):
        (alone,) = measure(
            f"runs={two_runs / 'rope'}",
            f"scaling={scaling}",
            "lengths=[16,32]",
            "fresh=true",
            f"out={tmp_path / scaling}",
        )
        assert [row["nll"] for row in alone["rows"]] == pytest.approx([row["nll"] for row in result["rows"]], abs=1e-6)


def test_an_interrupted_sweep_goes_on_to_the_same_files(two_runs, tmp_path, monkeypatch, caplog):
    settings = [f"runs=[{two_runs / 'learned'},{two_runs / 'rope'}]", "scalings=[none,linear]", "protocol=both"]
    caplog.set_level("INFO", "ropewalk")
    monkeypatch.setattr(results, "BATCH_TOKENS", 256)
    real, calls, stop = GPT.forward, [], [10**9]

    def counted(self, *args, **keys):
        if len(calls) == stop[0]:
            raise KeyboardInterrupt
        calls.append(1)
        return real(self, *args, **keys)

    monkeypatch.setattr(GPT, "forward", counted)
    measure(*settings, f"out={tmp_path / 'whole'}", "fresh=true")
    needed = len(calls)
    cache = Path(OmegaConf.load(two_runs / "rope" / "config.yaml").data.cache) / "measurements"
    shutil.rmtree(cache)
    for part in (1, 2, 3):
        calls.clear()
        stop[0] = needed // 4
        with pytest.raises(KeyboardInterrupt):
            measure(*settings, f"out={tmp_path / 'parts'}")
        assert len(calls) == needed // 4
        assert not (tmp_path / "parts").exists()
        assert part == 1 or "of them known from before" in caplog.text
    calls.clear()
    stop[0] = 10**9
    measure(*settings, f"out={tmp_path / 'parts'}")
    assert len(calls) == needed - 3 * (needed // 4)
    for name in ("extrapolation.json", "extrapolation.svg", "by_position.svg", "report.html"):
        parts, whole = ((tmp_path / folder / name).read_text() for folder in ("parts", "whole"))
        assert parts.replace("parts", "whole") == whole
    calls.clear()
    measure(*settings, f"out={tmp_path / 'parts'}")
    assert calls == []
    measure(*settings, f"out={tmp_path / 'parts'}", "fresh=true")
    assert len(calls) == needed


def test_a_changed_program_measures_anew(two_runs, tmp_path, monkeypatch):
    settings = [f"runs={two_runs / 'rope'}", "lengths=[16]", "stride=5", f"out={tmp_path}"]
    measure(*settings)
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", lambda *_, **__: 1 / 0)
        measure(*settings)
        for change in ("stride=6", "lengths=[15,16]", "documents=within", "precision=fp32", "max_targets=100"):
            with pytest.raises(ZeroDivisionError):
                measure(*settings, change)
        patch.setattr(store, "source_digest", lambda: "another")
        with pytest.raises(ZeroDivisionError):
            measure(*settings)


def test_seeds_are_grouped_and_compared_seed_by_seed(corpus, tmp_path, capsys):
    for pos in ("rope", "none"):
        for seed in (0, 1):
            run(tmp_path / f"{pos}{seed}", *TINY, *corpus, f"pos={pos}", f"seed={seed}", "train.max_steps=2")
    capsys.readouterr()
    results = measure(f"runs='{tmp_path}/*[01]'", "lengths=[16,32]", f"out={tmp_path / 'out'}", "reference=none_16")
    whole = json.loads((tmp_path / "out" / "extrapolation.json").read_text())
    assert [(group["model"], group["runs"]) for group in whole["groups"]] == [
        (f"{pos}_16", [f"{pos}_16_seed0", f"{pos}_16_seed1"]) for pos in ("none", "rope")
    ]
    values = [result["rows"][1]["perplexity"] for result in results[2:]]
    assert whole["groups"][1]["rows"][1]["perplexity"] == pytest.approx(sum(values) / 2)
    assert whole["groups"][1]["rows"][1]["perplexity_error"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    nll = [result["rows"][1]["nll"] for result in results]
    assert whole["paired"][1]["difference"] == pytest.approx((nll[2] - nll[0] + nll[3] - nll[1]) / 2)
    assert whole["paired"][1]["spread"] == pytest.approx(abs((nll[2] - nll[0]) - (nll[3] - nll[1])) / 2**0.5)
    assert "seeds" in capsys.readouterr().out


def test_the_same_training_twice_is_no_second_seed(two_runs, tmp_path):
    shutil.copytree(two_runs / "rope", tmp_path / "again")
    measure(f"runs=[{two_runs / 'rope'},{tmp_path / 'again'}]", "lengths=[16,32]", f"out={tmp_path / 'out'}")
    whole = json.loads((tmp_path / "out" / "extrapolation.json").read_text())
    assert [(group["model"], group["runs"]) for group in whole["groups"]] == [("rope", ["rope"]), ("again", ["again"])]
    assert [pair["difference"] for pair in whole["paired"]] == [0, 0]


def test_runs_with_different_tokenizers_are_compared_in_bits_per_byte_only(
    two_runs, tmp_path, monkeypatch, capsys, caplog
):
    """A second byte tokenizer under another name: same text, so bits per byte agree, but perplexities are not shown."""
    shutil.copytree(two_runs / "rope", tmp_path / "copy")
    config = OmegaConf.load(tmp_path / "copy" / "config.yaml")
    config.tokenizer.name = "other"
    OmegaConf.save(config, tmp_path / "copy" / "config.yaml")
    plain = get_tokenizer("bytes")
    renamed = copy.copy(plain)
    renamed.name = "other"
    monkeypatch.setattr(runs.trained, "get_tokenizer", lambda name, vocab_size: renamed if name == "other" else plain)
    capsys.readouterr()
    measure(f"runs=[{two_runs / 'rope'},{tmp_path / 'copy'}]", "lengths=[16,32]", f"out={tmp_path / 'out'}")
    shown = capsys.readouterr().out
    assert "bits per byte" in shown
    assert "perplexity" not in shown.replace("perplexity ÷ that at the training length", "")
    assert "nats a token minus" not in shown
    assert "bits per byte only" in caplog.text
    whole = json.loads((tmp_path / "out" / "extrapolation.json").read_text())
    assert whole["paired"] == []
    page = (tmp_path / "out" / "report.html").read_text()
    assert "bits per byte only" in page
    assert "sliding windows: perplexity<" not in page


def test_a_config_with_interpolations_is_not_read(two_runs, tmp_path):
    shutil.copytree(two_runs / "rope", tmp_path / "copy")
    path = tmp_path / "copy" / "config.yaml"
    path.write_text(path.read_text().replace("name: rope_16_seed0", "name: ${oc.env:HOME}"))
    with pytest.raises(ValueError, match="not a configuration written by"):
        measure(f"runs={tmp_path / 'copy'}")


def test_default_lengths():
    assert default_lengths(256) == [256, 320, 384, 512, 1024]
    assert default_lengths(1) == [1, 2, 4]


def test_which_checkpoint_is_measured(corpus, tmp_path):
    """The best is known from validation; here it is made to be another one than the last."""
    run(tmp_path / "run", *TINY, *corpus, "train.eval_every=2")
    mark_best(tmp_path / "run", 2, 1.0)
    settings = [f"runs={tmp_path / 'run'}", "lengths=[16]", "precision=fp32", f"out={tmp_path / 'out'}"]
    found = {}
    for which in ("last", "best", 2, 4):
        (result,) = measure(*settings, f"checkpoint={which}")
        found[which] = result["checkpoint"], result["rows"]
    assert found["last"] == found[4] == ("step_000004", found[4][1])
    assert found["best"] == found[2] == ("step_000002", found[2][1])
    assert found[2][1] != found[4][1]
    step = lambda row: row["step"] == 2 and "val/loss" in row  # noqa: E731
    (validated,) = [row["val/loss"] for row in metrics(tmp_path / "run") if step(row)]
    (result,) = measure(*settings, "checkpoint=2", "max_targets=64", "stride=8", "lengths=[16,20,24,32,64]")
    assert result["rows"][0]["nll"] == pytest.approx(validated, abs=1e-6)
    for which, words in ((3, "checkpoint=3: .* but those of 2, 4"), ("first", "checkpoint='first': use last, best")):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            measure(*settings, f"checkpoint={which}")
    (tmp_path / "run" / "checkpoint" / "best.json").unlink()
    with pytest.raises(FileNotFoundError, match="best checkpoint is not known"):
        measure(*settings, "checkpoint=best")
    path = tmp_path / "run" / "checkpoint" / "step_000002.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"ABCD")
    with pytest.raises(ValueError, match=r"step_000002\.safetensors: is damaged"):
        measure(*settings, "checkpoint=2")


def test_a_text_is_decoded_by_one_process():
    config = composed("task=sample", name="eval", schema=eval_module.EvalConfig)
    with pytest.raises(ValueError, match="without torchrun"):
        eval_module.sample_text(config, Ranks(rank=0, world_size=2))
