"""Sharded trainings: the numbers of whole ones; checkpoints that any number of processes reads, or none half."""

import json
import resource
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from model import GPT, GPTConfig
from model.checkpoint import latest_checkpoint, load_state
from model.positions import SCHEMES
from runs import autocast, check_sharding, shard
from runs.sharding import MOMENTS
from tests.processes import end, start, start_all
from tests.trained import TINY, command, metrics, run, same, weights

SETTINGS = [
    *TINY, "model.n_layer=2", "train.batch_size=12", "train.micro_batch_size=2", "train.lr=1e-2", "train.keep=9",
    "train.max_steps=6", "train.checkpoint_every=3", "train.eval_every=6", "model.train_length=8", "val.multiples=[2]",
]  # fmt: skip
FSDP = "sharding=fsdp"
# Without biases: the gradient of the keys' is rounding and nothing else, which Adam makes as large as any other's.
NOISY = ["model.dropout=0.2", "precision=bf16", "model.bias=false"]


@pytest.fixture(autouse=True)
def no_group_is_left():
    """A process alone that shards is a group of one from then on."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def assert_close(folder, whole, within=1e-4):
    """The same but for rounding. Six steps of 0.01 move a weight by up to 0.05; Adam turns rounding into 1e-5."""
    expected = weights(whole)
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=within, msg=f"{folder.name} {name}")
    rows = metrics(folder), metrics(whole)
    assert len(rows[0]) == len(rows[1])
    for row, other in zip(*rows, strict=True):
        assert row == pytest.approx(other, rel=10 * within), folder.name


def cases():
    for name in SCHEMES:
        # Tables of few rows: with three processes, some have none of them.
        keys = {"shaw": ["pos.max_distance=3"], "t5": ["pos.buckets=4", "pos.max_distance=6"]}.get(name, [])
        yield name, [f"pos={name}", *keys]
    yield "linear", ["pos=none", "model.attention=linear"]
    yield "scaled", ["pos=rope", "scaling=yarn", "scaling.factor=4", "model.n_kv_head=1", "model.bias=false"]


def test_every_scheme_is_trained_as_by_one_process(corpus, tmp_path):
    settings = [*SETTINGS, *corpus, "train.max_steps=2"]
    sharded = [(tmp_path / f"{name}-3", (*settings, *more, FSDP), False) for name, more in cases()]
    processes = start_all(sharded, ranks=3)
    for name, more in cases():
        run(tmp_path / name, *settings, *more)
    assert end(processes) == [0, 0, 0]
    for name, _ in cases():
        assert_close(tmp_path / f"{name}-3", tmp_path / name)


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    """Runs of two processes: sharded, as they were after step 3, and whole, with and without dropout."""
    root = tmp_path_factory.mktemp("two")
    noisy = (*SETTINGS, *corpus, *NOISY)
    plain = (*SETTINGS, *corpus)
    trainings = [
        ("fsdp", (*plain, FSDP, "profile=true")),
        ("none", plain),
        ("noisy-fsdp", (*noisy, FSDP)),
        ("noisy-none", noisy),
    ]
    assert end(start_all([(root / name, settings, False) for name, settings in trainings], ranks=2)) == [0, 0]
    return root


def begun(run_folder, folder):
    """A copy of a run as it was after its third step."""
    shutil.copytree(run_folder, folder)
    for path in [*folder.glob("checkpoint/step_000006*"), *folder.glob("extrapolation.*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def test_two_processes_train_alike_with_dropout_and_in_bf16(two):
    assert_close(two / "fsdp", two / "none")
    assert_close(two / "noisy-fsdp", two / "noisy-none", within=2e-3)  # bfloat16 rounds that coarsely
    assert not same(weights(two / "noisy-fsdp"), weights(two / "fsdp"))


def test_each_process_writes_its_half_of_the_moments(two):
    folder = two / "fsdp" / "checkpoint" / "step_000006.shards"
    halves = [safe_open(path, "pt") for path in sorted(folder.iterdir())]
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"] * 2  # no pickle of PyTorch's
    whole = load_state(latest_checkpoint(two / "none"))["optimizer"]["state"]
    small = load_state(latest_checkpoint(two / "fsdp"))["optimizer"]["state"]
    assert {frozenset(values) for values in small.values()} == {frozenset({"step"})}
    for index, values in whole.items():
        for key in MOMENTS:
            parts = [half.get_tensor(f"{key}.{index}") for half in halves]
            assert [len(part) for part in parts] == [-(-len(values[key]) // 2), len(values[key]) // 2]
            torch.testing.assert_close(torch.cat(parts), values[key], rtol=1e-2, atol=1e-7)


def test_a_run_goes_on_with_another_number_of_processes_or_another_sharding(two, corpus, tmp_path):
    plain, noisy = (*SETTINGS, *corpus), (*SETTINGS, *corpus, *NOISY)
    ways = [("fsdp", FSDP), ("fsdp", "sharding=none"), ("none", FSDP), ("none", "sharding=none")]
    names = [
        (begun(two / kind, tmp_path / str(i) / str(n)), n, how) for i, (kind, how) in enumerate(ways) for n in (1, 2, 3)
    ]
    noise = begun(two / "noisy-fsdp", tmp_path / "noise")
    jobs = {n: [(folder, (*plain, how), True) for folder, count, how in names if count == n] for n in (2, 3)}
    jobs[2].append((noise, (*noisy, FSDP), True))
    started = [start_all(trainings, ranks=n) for n, trainings in jobs.items()]
    for folder, count, how in names:
        if count == 1:
            run(folder, *plain, how, resume=True)
    assert [end(processes) for processes in started] == [[0, 0], [0, 0, 0]]
    for folder, *_ in names:
        assert_close(folder, two / "fsdp")
    for folder, kind in [(tmp_path / "0" / "2", "fsdp"), (tmp_path / "3" / "2", "none"), (noise, "noisy-fsdp")]:
        assert same(weights(folder), weights(two / kind))
        assert metrics(folder) == metrics(two / kind)


def test_gradients_are_averaged_once_a_step(two):
    events = json.loads((two / "fsdp" / "profile.json").read_text())["traceEvents"]
    found = [event for event in events if event.get("name") == "c10d::_reduce_scatter_base_"]
    assert len(found) == 3 * 3  # of two blocks and the rest, in three recorded steps of three parts each


def test_killed_in_a_checkpoint(two, corpus, tmp_path):
    """Whichever process it is, and whatever was written by then."""
    moments = [
        (1, ".step_000006.shards.tmp/shard-00002"),
        (0, ".step_000006.shards.tmp -> /"),
        (0, ".step_000006.pt"),
        (0, ".step_000006.safetensors"),
    ]
    settings, folders = (*SETTINGS, *corpus, FSDP), [begun(two / "fsdp", tmp_path / str(i)) for i in range(4)]
    killed = [
        start(folder, *settings, ranks=2, resume=True, kill_before=moment)
        for folder, moment in zip(folders, moments, strict=True)
    ]
    for processes, folder, (victim, _) in zip(killed, folders, moments, strict=True):
        codes = end(processes, within=60)
        assert codes[victim] == -9
        assert codes[1 - victim] not in (0, -9)
        assert list((folder / "checkpoint").glob("*step_000006*"))
        assert latest_checkpoint(folder, resumable=True).name == "step_000003.safetensors"
    assert end(start_all([(folder, settings, True) for folder in folders], ranks=2)) == [0, 0]
    for folder in folders:
        assert same(weights(folder), weights(two / "fsdp"))
        assert metrics(folder) == metrics(two / "fsdp")
        assert not list((folder / "checkpoint").glob(".*"))


def damage(path, how):
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))


@pytest.mark.parametrize("how", ["missing", "truncated", "changed"])
def test_a_damaged_shard_is_named_or_the_checkpoint_before_it_used(how, two, corpus, tmp_path):
    settings, second = (*SETTINGS, *corpus, FSDP), "shard-00002-model-00001-of-00001.safetensors"
    folder = begun(two / "fsdp", tmp_path / "one")
    shard_file = folder / "checkpoint" / "step_000003.shards" / second
    damage(shard_file, how)
    with pytest.raises(ValueError, match=rf"step_000003.shards/{second}: (is damaged|cannot be read)"):
        run(folder, *settings, resume=True)
    (folder / "checkpoint" / "step_000003.sha256").unlink()
    if how != "changed":  # which without digests nothing tells
        with pytest.raises(
            ValueError, match=rf"{second}: is missing" if how == "missing" else "step_000003.shards: not"
        ):
            run(folder, *settings, resume=True)
    shutil.copytree(two / "fsdp", folder := tmp_path / "two")
    damage(folder / "checkpoint" / "step_000006.shards" / second, how)
    assert latest_checkpoint(folder, resumable=True).name == "step_000003.safetensors"
    assert latest_checkpoint(folder).name == "step_000006.safetensors"


def test_a_shard_of_another_checkpoint_is_refused(two, corpus, tmp_path):
    folder = begun(two / "fsdp", tmp_path / "run")
    shards = folder / "checkpoint" / "step_000003.shards"
    shutil.copy(shards / "shard-00002-model-00001-of-00001.safetensors", shards / "shard-00003.safetensors")
    with pytest.raises(ValueError, match=r"shard-00003.safetensors: is not of this checkpoint"):
        run(folder, *SETTINGS, *corpus, FSDP, resume=True)


def test_a_state_of_another_model_is_refused(two, corpus, tmp_path):
    folder = begun(two / "fsdp", tmp_path / "run")
    weights_file = latest_checkpoint(folder)
    state = load_state(weights_file)
    state["optimizer"]["state"][999] = {}
    torch.save(state, weights_file.with_suffix(".pt"))
    weights_file.with_suffix(".sha256").unlink()
    with pytest.raises(ValueError, match=r"step_000003.pt: not a training state of this model"):
        run(folder, *SETTINGS, *corpus, FSDP, resume=True)


def test_a_full_disk_leaves_the_checkpoint_before(two, corpus, tmp_path):
    folder = begun(two / "fsdp", tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"step_000006.shards: cannot be written \(process 0: .*File too large"):
            run(folder, *SETTINGS, *corpus, FSDP, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert latest_checkpoint(folder, resumable=True).name == "step_000003.safetensors"


def test_a_folder_that_is_not_shared_is_an_error(corpus, tmp_path, monkeypatch):
    def and_another(found, mine):
        found[:] = [mine | {"shard-00002.safetensors": "written on another machine"}]

    monkeypatch.setattr(dist, "all_gather_object", and_another)
    with pytest.raises(OSError, match=r"shard-00002.safetensors: another process wrote it, and it is not here"):
        run(tmp_path, *SETTINGS, *corpus, FSDP)
    assert not list(tmp_path.glob("checkpoint/step*"))


def test_no_copies_of_weights_are_kept_for_the_pass_backward():
    """Those that autocast makes would undo in bf16 what sharding is for."""
    model = GPT(GPTConfig(vocab_size=61, n_layer=2, n_head=1, head_dim=64, train_length=16, pos={"name": "rope"}))
    size, kept = model.num_parameters(), {}
    shard(model, torch.device("cpu"), "bf16")
    assert model.num_parameters() == size

    def keep(tensor):
        if tensor.ndim == 2 and min(tensor.shape) >= 64:  # a matrix
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    tokens = torch.arange(8)[None]
    with autocast(torch.device("cpu"), "bf16"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nll = model(tokens, targets=tokens)
    matrices = [tensor for tensor in kept.values() if tensor.dtype == torch.bfloat16]
    assert len(matrices) == 2 * 4
    assert not any(tensor.untyped_storage().nbytes() for tensor in matrices)
    nll.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("sharding", "device", "precision", "compiled", "words"),
    [
        ("zero", "cpu", "fp32", False, r"sharding='zero': use none or fsdp"),
        ("fsdp", "cpu", "fp32", True, r"train.compile=true.*use false"),
        ("fsdp", "cuda", "fp16", False, r"precision=fp16.*use bf16 or fp32"),
        ("fsdp", "mps", "fp32", False, r"device=mps; use cuda or cpu"),
    ],
)
def test_what_it_does_not_go_with_is_refused(sharding, device, precision, compiled, words):
    with pytest.raises(ValueError, match=words):
        check_sharding(sharding, torch.device(device), precision, compiled)


def test_the_command(two, corpus, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command("train.py", *SETTINGS, *corpus, FSDP, "hydra.run.dir=run", cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert "FSDP" not in done.stderr  # a warning of PyTorch's that is none here
    assert same(weights(tmp_path / "run"), weights(two / "fsdp"))
    assert metrics(tmp_path / "run") == metrics(two / "fsdp")
