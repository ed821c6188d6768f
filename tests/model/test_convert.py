"""Conversion between the rotary pairings: equal logits, against a loop that moves one dimension at a time."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import model.convert
from model import GPT, load_run
from model.checkpoint import latest_checkpoint, load_state, save_checkpoint
from model.convert import convert_config, convert_layout, convert_run, main, permutation
from model.positions import SCHEMES
from tests.helpers import cached_logits, expect_error, random_tokens, small_model

REPOSITORY = Path(__file__).parents[2]
OTHER = {"half": "interleaved", "interleaved": "half"}
LAYOUTS = pytest.mark.parametrize("layout", OTHER)  # of the model before conversion
FRACTIONS = pytest.mark.parametrize("rotary_fraction", [1.0, 0.5, 0.75])
KV_HEADS = pytest.mark.parametrize("n_kv_head", [4, 2, 1])
BIAS = pytest.mark.parametrize("bias", [True, False])


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


def largest_difference(a: GPT, b: GPT, length: int = 80) -> float:
    """Of the logits of three sequences, by default well past the training length of 32."""
    tokens = random_tokens(a, 3, length)
    return (a(tokens) - b(tokens)).abs().max().item()


# ---- the model ------------------------------------------------------------------------------------------------------


def test_the_permutation_is_known():
    assert permutation(8, "half", "interleaved").tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert permutation(8, "interleaved", "half").tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert permutation(2, "half", "interleaved").tolist() == [0, 1]
    assert permutation(6, "half", "half").tolist() == list(range(6))


@pytest.mark.parametrize("rotary_dim", [2, 4, 10, 64])
def test_the_permutation_moves_each_dimension_to_its_place_in_the_same_plane(rotary_dim):
    for source, target in OTHER.items():
        order = permutation(rotary_dim, source, target)
        for plane in range(rotary_dim // 2):
            for member in (0, 1):
                new = dimension(target, plane, member, rotary_dim)
                assert order[new] == dimension(source, plane, member, rotary_dim)
        back = permutation(rotary_dim, target, source)
        assert torch.equal(order[back], torch.arange(rotary_dim))


@LAYOUTS
@FRACTIONS
@KV_HEADS
@BIAS
@torch.inference_mode()
def test_logits_are_equal_also_past_the_training_length(layout, rotary_fraction, n_kv_head, bias):
    original = small_model(rope(layout, rotary_fraction=rotary_fraction), n_kv_head=n_kv_head, bias=bias)
    converted = convert_layout(original, OTHER[layout])
    assert converted.config.pos == {**original.config.pos, "layout": OTHER[layout]}
    assert largest_difference(original, converted) < 1e-12


@LAYOUTS
@FRACTIONS
@KV_HEADS
@BIAS
def test_the_weights_are_those_moved_by_hand(layout, rotary_fraction, n_kv_head, bias):
    original = small_model(rope(layout, rotary_fraction=rotary_fraction), n_kv_head=n_kv_head, bias=bias)
    converted = convert_layout(original, OTHER[layout])
    assert same(converted.state_dict(), by_hand(original, OTHER[layout]))
    assert same(convert_layout(converted, layout).state_dict(), original.state_dict())


@FRACTIONS
@KV_HEADS
def test_only_the_turning_rows_of_queries_and_keys_change(rotary_fraction, n_kv_head):
    original = small_model(rope("half", rotary_fraction=rotary_fraction), n_kv_head=n_kv_head)
    state, converted = original.state_dict(), convert_layout(original, "interleaved").state_dict()
    changed = [name for name in state if not torch.equal(state[name], converted[name])]
    assert changed == [f"blocks.{layer}.attention.qkv.{kind}" for layer in (0, 1) for kind in ("weight", "bias")]
    for name in changed:
        moved = (state[name] != converted[name]).view(4 + 2 * n_kv_head, 16, -1).any(dim=-1)  # (heads, head_dim)
        assert moved[: 4 + n_kv_head].any(dim=1).all()  # every query and key head
        assert not moved[4 + n_kv_head :].any()  # no value
        assert not moved[:, int(16 * rotary_fraction) :].any()


@torch.inference_mode()
def test_a_row_forgotten_or_moved_in_vain_would_be_seen():
    original = small_model(rope("half", rotary_fraction=0.5), n_kv_head=2)
    start, state = original.state_dict(), convert_layout(original, "interleaved").state_dict()
    weight, bias = "blocks.1.attention.qkv.weight", "blocks.1.attention.qkv.bias"
    wrong = {
        "biases": {bias: start[bias]},
        "queries": {weight: torch.cat((start[weight][:64], state[weight][64:]))},
        "last key head": {weight: torch.cat((state[weight][:80], start[weight][80:]))},
        "values": {weight: torch.cat((state[weight][:96], state[weight][96:].view(2, 2, 8, -1).flip(2).flatten(0, 2)))},
    }
    for what, tensors in wrong.items():
        broken = convert_layout(original, "interleaved")
        assert largest_difference(original, broken) < 1e-12
        broken.load_state_dict({**state, **tensors})
        assert largest_difference(original, broken) > 1e-3, what


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
    assert converted.config.scaling == original.config.scaling
    assert largest_difference(original, converted, length=20) < 1e-12
    assert largest_difference(original, converted) < 1e-12


@LAYOUTS
@torch.inference_mode()
def test_the_cached_pass_of_a_converted_model_is_its_full_pass(layout):
    original = small_model(rope(layout, rotary_fraction=0.5), n_kv_head=2)
    converted = convert_layout(original, OTHER[layout])
    tokens = random_tokens(original, 2, 40)
    cached = cached_logits(converted, tokens, [7, 1, 20])
    torch.testing.assert_close(cached, converted(tokens), rtol=0, atol=1e-12)
    torch.testing.assert_close(cached, original(tokens), rtol=0, atol=1e-12)


def test_the_given_model_is_left_as_it_is_and_shares_nothing():
    original = small_model(rope("half"), torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    random_state = torch.get_rng_state()
    converted = convert_layout(original.train(), "interleaved")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert original.config.pos["layout"] == "half"
    assert converted.training
    assert not convert_layout(original.eval(), "interleaved").training
    assert all(parameter.dtype == torch.bfloat16 for parameter in converted.parameters())
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.zero_()
    assert same(original.state_dict(), before)
    converted(random_tokens(converted, 1, 8)).float().sum().backward()  # a model like any other: it can be trained
    assert converted.blocks[0].attention.qkv.weight.grad is not None


def test_the_same_layout_is_a_copy():
    original = small_model(rope("interleaved"))
    copy = convert_layout(original, "interleaved")
    assert copy is not original
    assert copy.config == original.config
    assert same(copy.state_dict(), original.state_dict())


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ValueError, match=r"layout='neox': known layouts are half, interleaved"):
        convert_layout(small_model(rope("half")), "neox")
    for name in set(SCHEMES) - {"rope"}:
        with pytest.raises(ValueError, match=f"pos={name}: has no layout"):
            convert_layout(small_model({"name": name}), "half")


# ---- the run folder -------------------------------------------------------------------------------------------------


def settings(layout: str = "half", name: str = "rope_32_seed0", wandb_id: str | None = "12345678") -> dict:
    """As much of train.py's config.yaml as matters here: the keys that are changed, and others that look like them."""
    return {
        "name": name,
        "resume": None,
        "model": {"n_layer": 2, "n_kv_head": None, "train_length": 32},
        "pos": {"name": "rope", "base": 10000.0, "layout": layout, "rotary_fraction": 0.5},
        "scaling": {"name": "longrope", "factor": None, "short": [1.0, 2.0], "long": [1.0, 3.0]},
        "data": {"name": "files", "path": "layout: half", "layout": "half", "wandb_id": "other"},
        "tokenizer": {"name": "bytes"},
        "val": {"multiples": [1.0, 2.0]},
        "wandb": {"mode": "auto", "project": "ropewalk"},
        "provenance": {
            "command": "train.py name='a\nwandb_id: 1\nname: c'",  # quoted, with empty lines
            "machine": "Linux x86_64 " * 12 + "\n  wandb_id: 2\nname: d",  # too long for a line
            "fingerprint": "0123456789",
            "wandb_id": wandb_id,
            "python": "3.11",
        },
    }


def run_folder(folder: Path, pos: dict | None = None, text: str | None = None, **model_settings) -> GPT:
    """A run of step 40, with the files that a finished run has."""
    trained = small_model(pos or rope("half", rotary_fraction=0.5), torch.float32, **model_settings)
    save_checkpoint(folder, 40, trained, {"step": 40, "optimizer": {}, "fingerprint": "0123456789"})
    written = OmegaConf.to_yaml(OmegaConf.create(settings())) if text is None else text
    (folder / "config.yaml").write_text(written, encoding="utf-8")
    for name in ("metrics.jsonl", "extrapolation.json", "extrapolation.png", "train.log"):
        (folder / name).write_text("{}\n")
    return trained


def snapshot(folder: Path) -> dict:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_command_as_a_user_types_it(tmp_path):
    trained = run_folder(tmp_path / "a run", n_kv_head=2)
    before = snapshot(tmp_path)
    command = [sys.executable, "-m", "model.convert", f"run={tmp_path / 'a run'}", "layout=interleaved"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "a run_interleaved"
    assert str(out) in done.stdout
    assert "not resumed" in done.stdout
    after = snapshot(tmp_path)
    assert {path: after.pop(path) for path in before} == before
    assert {str(path) for path in after} == {
        "a run_interleaved/config.yaml",
        "a run_interleaved/checkpoint/step_000040.safetensors",
        "a run_interleaved/checkpoint/step_000040.sha256",
    }
    converted = load_run(out)
    assert converted.config.pos == {**trained.config.pos, "layout": "interleaved"}
    assert largest_difference(trained.double(), converted.double()) < 1e-12
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ")
    assert "exists already" in again.stderr
    assert "Traceback" not in again.stderr


def test_config_yaml_differs_in_three_lines(tmp_path):
    run_folder(tmp_path / "run")
    out = convert_run(tmp_path / "run", "interleaved", tmp_path / "new" / "folder")
    assert out == tmp_path / "new" / "folder"
    old, new = ((folder / "config.yaml").read_text().split("\n") for folder in (tmp_path / "run", out))
    assert len(old) == len(new)
    assert [(a, b) for a, b in zip(old, new, strict=True) if a != b] == [
        ("name: rope_32_seed0", "name: rope_32_seed0_interleaved"),
        ("  layout: half", "  layout: interleaved"),
        ("  wandb_id: '12345678'", "  wandb_id: null"),
    ]


@LAYOUTS
@pytest.mark.parametrize("wandb_id", [None, "abcd1234", "12345e67"])
@pytest.mark.parametrize(
    "name", ["a b", "1", "it's", "it'", "'q'", '"q"', "a # b", "a#b", "é\t", "", "null", "- a", "☺"]
)
def test_whatever_the_name_yaml_reads_it_back(name, wandb_id, layout):
    old = settings(layout, name, wandb_id)
    text = convert_config(OmegaConf.to_yaml(OmegaConf.create(old)), layout, OTHER[layout])
    expected = settings(OTHER[layout], f"{name}_{OTHER[layout]}", None)
    assert OmegaConf.to_container(OmegaConf.create(text)) == expected


def test_there_and_back_is_the_first_run_bit_for_bit(tmp_path):
    trained = run_folder(tmp_path / "run", n_kv_head=1)
    there = convert_run(tmp_path / "run", "interleaved")
    back = convert_run(there, "half")
    assert back.name == "run_interleaved_half"
    assert same(load_run(back).state_dict(), trained.state_dict())
    assert load_run(back).config == trained.config


def test_a_converted_run_cannot_be_resumed(tmp_path):
    run_folder(tmp_path / "run")
    weights = latest_checkpoint(convert_run(tmp_path / "run", "interleaved"))
    assert weights.stem == "step_000040"
    with pytest.raises(ValueError, match="cannot be resumed from"):
        load_state(weights)


def test_paths_may_be_relative(tmp_path, monkeypatch):
    run_folder(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    assert convert_run(".", "interleaved") == tmp_path / "run_interleaved"
    assert convert_run("../run/", "interleaved", "../out/") == tmp_path / "out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run", "run_interleaved"]


@pytest.mark.parametrize("fails", ["save_checkpoint", "write_text", "rename"])
def test_a_failure_leaves_nothing_behind(fails, tmp_path, monkeypatch, capsys):
    run_folder(tmp_path / "run")
    before = snapshot(tmp_path)

    def crash(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(model.convert if fails == "save_checkpoint" else Path, fails, crash)
    assert "disk full" in expect_error(main, capsys, f"run={tmp_path / 'run'}", "layout=interleaved")
    monkeypatch.undo()
    assert snapshot(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_wrong_settings_are_named(tmp_path, capsys):
    run_folder(tmp_path / "run")
    run_folder(tmp_path / "alibi", {"name": "alibi"})
    (tmp_path / "taken").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = snapshot(tmp_path)
    run = f"run={tmp_path / 'run'}"
    for words, expected in (
        ([], "use run=<run folder> layout=half or interleaved"),
        ([run], "use run="),
        (["layout=half"], "use run="),
        ([run, "layout="], "'layout=' is no setting"),
        ([run, "layout=interleaved", "out="], "'out=' is no setting"),
        ([run, "layout=interleaved", "step=3"], "'step=3' is no setting"),
        ([run, "layout=interleaved", "force"], "'force' is no setting"),
        ([run, "layout=neox"], "layout='neox': known layouts are half, interleaved"),
        ([run, "layout=a/b"], "layout='a/b': known layouts"),
        ([run, "layout=half"], f"layout=half: {tmp_path / 'run'} has this layout already"),
        ([f"run={tmp_path / 'nowhere'}", "layout=half"], "nowhere: no such run folder"),
        ([f"run={tmp_path / 'taken'}", "layout=half"], "taken: holds no checkpoint"),
        ([f"run={tmp_path / 'alibi'}", "layout=half"], "pos=alibi: has no layout to convert"),
        ([run, "layout=interleaved", f"out={tmp_path / 'taken'}"], "taken: exists already"),
        ([run, "layout=interleaved", f"out={tmp_path / 'dangling'}"], "dangling: exists already"),
        ([run, "layout=interleaved", run.replace("run=", "out=")], "run: exists already"),
    ):
        assert expected in expect_error(main, capsys, *words)
    assert snapshot(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alibi", "dangling", "run", "taken"]


def test_a_config_that_train_did_not_write_is_refused(tmp_path, capsys):
    whole = OmegaConf.to_yaml(OmegaConf.create(settings()))
    run_folder(tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    for old, new, key in (
        ("  layout: half\n  rotary", "  rotary", "pos.layout"),  # the other blocks' lines do not count
        ("  layout: half\n  rotary", "  layout: half\n  layout: half\n  rotary", "pos.layout"),
        ("  layout: half\n  rotary", "  layout: half\n  layout: interleaved\n  rotary", "pos.layout"),
        ("  layout: half\n  rotary", "  layout: interleaved\n  rotary", "pos.layout"),  # not what the weights are
        ("  layout: half\n  rotary", "  layout: half # planes\n  rotary", "pos.layout"),
        ("  layout: half\n  rotary", "    layout: half\n  rotary", "pos.layout"),
        ("pos:\n", "position:\n", "pos.layout"),
        ("  wandb_id: '12345678'\n", "", "provenance.wandb_id"),
        ("provenance:\n", "origin:\n", "provenance.wandb_id"),
        ("name: rope_32_seed0\n", "", "name"),
        ("name: rope_32_seed0\n", "name: rope_32_seed0\nname: b\n", "name"),
        ("name: rope_32_seed0\n", "name: rope_32_seed0 # the first\n", "name"),
        ("name: rope_32_seed0\n", "name: |\n  rope\n", "name"),
        ("name: rope_32_seed0\n", "name: rope\n  32\n", "name"),
        ("name: rope_32_seed0\n", "name: 'rope\n\n  32'\n", "name"),
        ("name: rope_32_seed0\n", "name: 'it''\n\n  32'\n", "name"),
    ):
        assert whole.count(old) == 1
        path.write_text(whole.replace(old, new))
        error = expect_error(main, capsys, f"run={tmp_path / 'run'}", "layout=interleaved")
        assert f"{path}: {key}: expected once, on one line" in error
    path.write_bytes(b"name: \xff\n")
    assert str(path) in expect_error(main, capsys, f"run={tmp_path / 'run'}", "layout=interleaved")
    path.unlink()
    assert "it has no config.yaml" in expect_error(main, capsys, f"run={tmp_path / 'run'}", "layout=interleaved")
    latest_checkpoint(tmp_path / "run").write_bytes(b"")
    assert "is damaged" in expect_error(main, capsys, f"run={tmp_path / 'run'}", "layout=interleaved")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_it_needs_no_more_than_the_rest_of_the_folder_does():
    tree = ast.parse((REPOSITORY / "model" / "convert.py").read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    outside = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "numpy", "safetensors", "model"}
