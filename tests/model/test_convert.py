"""Conversion between the rotary pairings: equal logits, against a loop that moves one dimension at a time."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from model import GPT, load_run
from model.checkpoint import latest_checkpoint, load_state, save_checkpoint
from model.convert import convert_layout, convert_run, main
from model.positions import SCHEMES
from tests.helpers import cached_logits, random_tokens, small_model

OTHER = {"half": "interleaved", "interleaved": "half"}
LAYOUTS = pytest.mark.parametrize("layout", OTHER)  # of the model before conversion


def rope(layout: str, **keys) -> dict:
    return {"name": "rope", "layout": layout, **keys}


def dimension(layout: str, plane: int, member: int, rotary_dim: int) -> int:
    """Where in the head the first (0) or second (1) dimension of a plane is."""
    return plane + member * (rotary_dim // 2) if layout == "half" else 2 * plane + member


def by_hand(original: GPT, target: str) -> dict:
    """The state dict of the converted model, filled one row at a time."""
    c, state = original.config, original.state_dict()
    rotary_dim = int(c.head_dim * c.pos["rotary_fraction"])
    expected = {name: tensor.clone() for name, tensor in state.items()}
    for layer in range(c.n_layer):
        for kind in ["weight", "bias"] if c.bias else ["weight"]:
            name = f"blocks.{layer}.attention.qkv.{kind}"
            for head in range(c.n_head + c.n_kv_head):
                for plane in range(rotary_dim // 2):
                    for member in (0, 1):
                        old = head * c.head_dim + dimension(c.pos["layout"], plane, member, rotary_dim)
                        new = head * c.head_dim + dimension(target, plane, member, rotary_dim)
                        expected[name][new] = state[name][old]
    return expected


def same(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# ---- the model ------------------------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("rotary_fraction", [1.0, 0.5, 0.75])
@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 2, "bias": False}, {"n_kv_head": 1}], ids=str)
@torch.inference_mode()
def test_weights_are_moved_and_logits_are_equal_also_past_the_training_length(layout, rotary_fraction, settings):
    original = small_model(rope(layout, rotary_fraction=rotary_fraction), **settings)
    converted = convert_layout(original, OTHER[layout])
    assert converted.config.pos == {**original.config.pos, "layout": OTHER[layout]}
    assert same(converted.state_dict(), by_hand(original, OTHER[layout]))  # and the original is as it was
    assert same(convert_layout(converted, layout).state_dict(), original.state_dict())
    tokens = random_tokens(original, 3, 80)
    torch.testing.assert_close(converted(tokens), original(tokens), rtol=0, atol=1e-12)
    torch.testing.assert_close(cached_logits(converted, tokens, [7, 1, 60]), original(tokens), rtol=0, atol=1e-12)


@LAYOUTS
@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "linear", "n_kv_head": 2},
        {"scaling": {"name": "dynamic"}},
        {"scaling": {"name": "longrope", "short": [1.0, 1.5, 2.0, 3.0], "long": [1.0, 2.0, 5.0, 9.0]}},
    ],
    ids=["linear", "dynamic", "longrope"],
)
@torch.inference_mode()
def test_linear_attention_and_scalings_go_by_planes_not_by_layout(layout, settings):
    original = small_model(rope(layout, rotary_fraction=0.5, base=500.0), **settings)
    converted = convert_layout(original, OTHER[layout])
    for length in (20, 80):
        tokens = random_tokens(original, 3, length)
        torch.testing.assert_close(converted(tokens), original(tokens), rtol=0, atol=1e-12)


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ValueError, match=r"layout='neox': known layouts are half, interleaved"):
        convert_layout(small_model(rope("half")), "neox")
    for name in set(SCHEMES) - {"rope"}:
        with pytest.raises(ValueError, match=f"pos={name}: has no layout"):
            convert_layout(small_model({"name": name}), "half")


# ---- the run folder -------------------------------------------------------------------------------------------------

SETTINGS = {
    "name": "1",
    "pos": {"name": "rope", "base": 10000.0, "layout": "half", "rotary_fraction": 0.5},
    "train": {"lr": 1e-5, "min_lr_ratio": 1e6},
    "data": {"name": "files", "path": "layout: half", "revision": "12345e67"},
    "wandb": {"tags": ["null", "☺", "it's"]},
    "provenance": {"command": "train.py name='a\nname: c'", "fingerprint": "0123456789", "wandb_id": "12345678"},
}


def run_folder(folder: Path, pos: dict | None = None, **model_settings) -> GPT:
    """A run of step 40."""
    trained = small_model(pos or rope("half", rotary_fraction=0.5), torch.float32, **model_settings)
    save_checkpoint(folder, 40, trained.config, trained.state_dict(), {"step": 40})
    OmegaConf.save(OmegaConf.create(SETTINGS), folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("{}\n")
    return trained


def snapshot(folder: Path) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_converted_run_can_be_loaded_and_not_resumed(tmp_path, capsys):
    trained = run_folder(tmp_path / "a run", n_kv_head=2)
    before, out = snapshot(tmp_path), tmp_path / "a run_interleaved"
    main([str(tmp_path / "a run"), "interleaved"])
    said = capsys.readouterr().out
    assert said == f"wrote {out}: pos.layout=interleaved; it can be measured and started from\n"
    after = snapshot(tmp_path)
    assert before.items() <= after.items()
    assert after.keys() - before.keys() == {out / "config.yaml", out / "checkpoint" / "step_000040.safetensors"}
    converted = load_run(out)
    assert converted.config.pos == {**trained.config.pos, "layout": "interleaved"}
    with pytest.raises(ValueError, match="not a whole training state, to resume from"):
        load_state(latest_checkpoint(out))
    expected = {**SETTINGS, "name": "1_interleaved", "pos": {**SETTINGS["pos"], "layout": "interleaved"}}
    expected["provenance"] = {**SETTINGS["provenance"], "wandb_id": None}
    assert OmegaConf.load(out / "config.yaml") == expected
    back = convert_run(out, "half", tmp_path / "new" / "back")
    assert back == tmp_path / "new" / "back"
    assert same(load_run(back).state_dict(), trained.state_dict())
    assert load_run(back).config == trained.config


def test_what_a_user_can_mend_is_named(tmp_path, capsys):
    run_folder(tmp_path / "run")
    run_folder(tmp_path / "alibi", {"name": "alibi"})
    run_folder(tmp_path / "bare")
    (tmp_path / "bare" / "config.yaml").unlink()
    (tmp_path / "taken").mkdir()
    before, run = snapshot(tmp_path), tmp_path / "run"
    for words, expected in (
        ([], "usage: python -m model.convert"),
        ([run, "neox"], "invalid choice: 'neox'"),
        ([run, "half"], f"error: layout=half: {run} has this layout already"),
        ([tmp_path / "nowhere", "half"], "nowhere: no such run folder"),
        ([tmp_path / "taken", "half"], "taken: no such run folder, or it holds no checkpoint"),
        ([tmp_path / "bare", "interleaved"], "bare/config.yaml"),
        ([tmp_path / "alibi", "half"], "pos=alibi: has no layout to convert"),
        ([run, "interleaved", "--out", tmp_path / "taken"], "taken: exists already"),
    ):
        with pytest.raises(SystemExit) as exited:
            main([str(word) for word in words])
        assert exited.value.code == 2
        assert expected in capsys.readouterr().err
        assert snapshot(tmp_path) == before
