"""eval.py on trained runs: what it measures, shows, keeps and refuses."""

import json
import shutil

import pytest
import torch
from omegaconf import OmegaConf

import eval as eval_module
from eval import EvalConfig, default_lengths, sample_text
from runs.processes import Ranks
from tests.trained import TINY, command, composed, measure, run


def test_evaluation_takes_the_latest_run_and_agrees_with_training(corpus, tmp_path, capsys):
    for pos in ("learned", "rope"):
        run(tmp_path / pos, *TINY, *corpus, f"pos={pos}")
    trained = json.loads((tmp_path / "rope" / "extrapolation.json").read_text())
    capsys.readouterr()
    (result,) = measure(f"root={tmp_path}", "max_windows=8", "precision=fp32")
    assert result["pos"]["name"] == "rope"
    assert result["rows"] == trained["rows"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sliding windows")
    assert [line.split()[0] for line in lines[2:7]] == ["16", "20", "24", "32", "64"]


def test_evaluation_of_two_runs_side_by_side(two_runs, tmp_path, capsys):
    folders = f"runs=[{two_runs / 'learned'},{two_runs / 'rope'}]"
    results = measure(folders, "lengths=[16,32]", "truncated=true", "recall=true", "attention=true", f"out={tmp_path}")
    assert [row["perplexity"] is None for row in results[0]["rows"]] == [False, True]
    assert results[0]["rows"][0]["scored"] == results[1]["rows"][0]["scored"]  # the same tokens
    shown = capsys.readouterr().out
    assert "table ends at 16" in shown
    assert "rope_16_seed0, last 16" in shown
    whole = json.loads((tmp_path / "extrapolation.json").read_text())
    names = [f"{pos}_16_seed0{cut}" for cut in ("", ", last 16") for pos in ("learned", "rope")]
    assert [result["run"] for result in whole["results"]] == names
    assert [row["nll"] for row in results[3]["rows"]] == [results[1]["rows"][0]["nll"]] * 2
    pairs = [(pair["model"], pair["length"]) for pair in whole["paired"]]
    assert pairs[0] == ("rope_16_seed0", 16)
    assert {path.stem for path in tmp_path.glob("*.svg")} >= {"extrapolation", "by_position", "recall"}


def test_training_lengths_are_measured_too(corpus, tmp_path):
    folders = [tmp_path / "16", tmp_path / "24"]
    for folder in folders:
        run(folder, *TINY, *corpus, "pos=rope", f"model.train_length={folder.name}", "train.max_steps=1")
    out = f"out={tmp_path / 'out'}"
    for result in measure(f"runs=[{folders[0]},{folders[1]}]", "lengths=[16,32]", out):
        assert [row["length"] for row in result["rows"]] == [16, 24, 32]
        assert "against_train_length" in result["rows"][2]
    (result,) = measure(f"runs={folders[1]}", "lengths=[32,64]", "stride=32", out)  # no window of 24 has 32 targets
    assert [row["length"] for row in result["rows"]] == [32, 64]


def test_evaluation_on_other_data_says_so(two_runs, tmp_path, caplog):
    shutil.copytree(two_runs / "rope", tmp_path / "copy")
    config = OmegaConf.load(tmp_path / "copy" / "config.yaml")
    config.provenance.fingerprint = "another"
    config.train.max_steps = 9
    OmegaConf.save(config, tmp_path / "copy" / "config.yaml")
    measure(f"runs={tmp_path / 'copy'}", "lengths=[16]")
    assert "was trained on data another" in caplog.text
    assert "step 4 of 9, not trained to its end" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["runs=[]"], r"runs=\[\]"),
        (["runs=nowhere"], "nowhere: not a run folder"),
        (["root=nowhere"], "no run with a checkpoint under nowhere"),
        (["runs='nothing*'"], r"nothing\*: not a run folder"),
        (["lengths=[]"], r"lengths=\[\]"),
        (["lengths=[100000]"], "do not fit into"),
        (["stride=17"], "stride=17"),
        (["stride=0"], "stride=0"),
        (["protocol=slide"], "sliding or nonoverlapping; .* both"),
        (["max_windows=0"], "max_windows=0"),
        (["documents=within", "lengths=[16,200]"], "no document holds a window of 200 .*the longest has"),
        (["scalings=[yarm]"], "scaling='yarm': known names are none, linear"),
        (["scalings=[none]", "scaling=yarn"], "without scaling="),
        (["runs=[learned]", "scalings=[yarn]"], "none of them fits .*no frequencies to scale"),
        (["reference=alibi"], "reference='alibi': use one of rope_16_seed0"),
        (["checkpoint=3"], "checkpoint=3: .* steps 2, 4"),
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
    "task", [measure, lambda *o: sample_text(composed(*o, "prompt=a", name="eval", schema=EvalConfig))]
)
@pytest.mark.parametrize("change", [{"pos": {"name": "none"}}, {"tokenizer": {"name": "gpt2", "vocab_size": 300}}])
def test_a_config_that_is_not_of_its_checkpoint_is_refused(task, change, two_runs, tmp_path, monkeypatch):
    shutil.copytree(two_runs / "rope", tmp_path / "copy")
    path = tmp_path / "copy" / "config.yaml"
    config = OmegaConf.load(path)
    config.update(change)
    OmegaConf.save(config, path)
    other = type("Tokenizer", (), {"vocab_size": 300, "name": "gpt2-300"})
    monkeypatch.setattr(eval_module, "get_tokenizer", lambda name, vocab_size: other)
    with pytest.raises(ValueError, match=r"copy: config\.yaml says (pos|vocab_size)="):
        task(f"runs={tmp_path / 'copy'}", f"out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_a_grid_measures_what_makes_sense_and_says_what_it_leaves_out(two_runs, tmp_path, caplog):
    caplog.set_level("INFO", "ropewalk")
    yarns = "scalings=[null,yarn,{name: yarn, beta_fast: 8}]"
    folders, out = f"runs=[{two_runs / 'learned'},{two_runs / 'rope'}]", f"out={tmp_path}"
    results = measure(folders, yarns, "protocol=both", "lengths=[16,32]", out)
    names = ["learned_16_seed0", *(f"rope_16_seed0{words}" for words in ("", " yarn", " yarn beta_fast=8"))]
    assert [(result["run"], result["protocol"]) for result in results] == [
        (name, protocol) for name in names for protocol in ("sliding", "nonoverlapping")
    ]
    assert "left out learned_16_seed0 yarn: pos=learned has no frequencies to scale" in caplog.messages
    (alone,) = measure(f"runs={two_runs / 'rope'}", "scaling=yarn", "lengths=[16,32]", out)
    assert [row["nll"] for row in alone["rows"]] == pytest.approx([row["nll"] for row in results[4]["rows"]], abs=1e-6)


def test_seeds_are_grouped_and_the_same_training_twice_is_no_second_seed(corpus, tmp_path, capsys):
    for seed in (0, 1):
        run(tmp_path / f"run{seed}", *TINY, *corpus, "pos=rope", f"seed={seed}", "train.max_steps=2")
    shutil.copytree(tmp_path / "run0", tmp_path / "2026_run")
    folders = [str(tmp_path / name) for name in ("run0", "2026_run", "run1")]
    results = measure(f"runs=[{','.join(folders)}]", "lengths=[16,32]", f"out={tmp_path / 'out'}")
    whole = json.loads((tmp_path / "out" / "extrapolation.json").read_text())
    assert [(group["model"], group["seeds"]) for group in whole["groups"]] == [
        ("rope_16", [0, 1]),
        ("rope_16_seed0", [0]),
    ]
    nll = [result["rows"][1]["nll"] for result in results]
    assert whole["groups"][0]["rows"][1]["nll"] == pytest.approx((nll[0] + nll[2]) / 2)
    assert "0 against 0, 1 (not paired)" in capsys.readouterr().out


def test_which_checkpoint_is_measured(two_runs):
    found = [measure(f"runs={two_runs / 'rope'}", "lengths=[16]", f"checkpoint={step}")[0] for step in (2, 4, "null")]
    assert [result["checkpoint"] for result in found] == ["step_000002", "step_000004", "step_000004"]
    assert found[0]["rows"] != found[1]["rows"] == found[2]["rows"]


def test_default_lengths():
    assert default_lengths(256) == [256, 320, 384, 512, 1024]
    assert default_lengths(1) == [1, 2, 4]


def sample(*settings):
    return sample_text(composed("device=cpu", "precision=fp32", *settings, name="eval", schema=EvalConfig))


def test_a_text_is_shown_as_it_is_decoded_and_ends_with_its_document(two_runs, capsys, monkeypatch):
    settings = [f"runs={two_runs / 'rope'}", "tokens=30", 'prompt="docu"']
    (text,) = sample(*settings)
    shown = capsys.readouterr().out
    assert shown == text + "\n"
    assert text.startswith("docu")
    assert sample(*settings) == [text]
    assert sample(*settings, "seed=1") != [text]
    several = sample(f"runs={two_runs / 'rope'}", "tokens=7", "temperature=0", "prompt=[do,document 1]")
    assert [several[0]] == sample(f"runs={two_runs / 'rope'}", "tokens=7", "temperature=0", "prompt=do")
    tokenizer = eval_module.get_tokenizer("bytes")
    stream = [[ord("a")], [ord("b")], [tokenizer.end_of_document], [ord("c")]]
    monkeypatch.setattr(eval_module, "stream", lambda *a, **k: map(torch.tensor, stream))
    assert sample(*settings) == [tokenizer.decode([*b"docuab", tokenizer.end_of_document])]


def test_a_text_is_decoded_by_one_process():
    config = composed("prompt=a", "runs=some", name="eval", schema=EvalConfig)
    with pytest.raises(ValueError, match="without torchrun"):
        sample_text(config, Ranks(rank=0, world_size=2))


@pytest.mark.parametrize(
    ("setting", "message"),
    [("tokens=0", r"^tokens=0: must be"), ("prompt=[]", r"^prompts=\[\]: give"), ("seed=-1", r"^seed=-1: must be")],
)
def test_what_cannot_be_continued_is_refused_by_name(setting, message, two_runs):
    given = composed(f"runs={two_runs / 'rope'}", "prompt=a", setting, name="eval", schema=EvalConfig)
    with pytest.raises(ValueError, match=message):
        sample_text(given)


@pytest.mark.slow
def test_the_terminal_knows_ascii_only(two_runs, tmp_path):
    settings = [f"runs={two_runs / 'rope'}", "lengths=[16,32]", "wandb.mode=disabled", "device=cpu", f"out={tmp_path}"]
    done = command("eval.py", *settings, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "? at 16" in done.stdout
    assert (tmp_path / "report.html").is_file()
