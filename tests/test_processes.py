"""Several processes train what one trains, sharded or not; their checkpoints are those of one process."""

import shutil
import sys
import time

import pytest
import torch

from model.checkpoint import latest_checkpoint, load_state
from model.positions import SCHEMES
from runs.processes import Ranks
from tests.processes import end, start
from tests.test_resume import assert_equal, finish
from tests.test_tasks import SMALL
from tests.trained import REPOSITORY, TINY, assert_near, command, metrics, run, same, weights

SETTINGS = [
    *TINY, "model.n_layer=2", "train.batch_size=12", "train.micro_batch_size=2", "train.lr=1e-2", "train.keep=9",
    "train.max_steps=6", "train.checkpoint_every=3", "train.eval_every=6", "model.train_length=8", "val.multiples=[2]",
]  # fmt: skip
FSDP = "sharding=fsdp"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def assert_close(folder, whole, within=1e-4):
    """The same but for rounding. Six steps of 0.01 move a weight by up to 0.05; Adam turns rounding into 1e-5."""
    expected = weights(whole)
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=within, msg=f"{folder.name} {name}")
    assert_near(folder, whole, rel=10 * within)


def begun(run_folder, folder):
    """A copy of a run as it was after its third step."""
    shutil.copytree(run_folder, folder)
    for path in [*folder.glob("checkpoint/step_000006*"), *folder.glob("extrapolation.*")]:
        path.unlink()
    return folder


def test_a_process_alone_needs_no_other():
    ranks = Ranks()
    assert ranks.first
    assert ranks.share("x") == "x"
    assert ranks.add_up(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert ranks.in_turn(lambda: 3) == 3


@pytest.mark.slow
def test_a_process_group_ends_with_all_its_threads(tmp_path):
    """A thread that outlives its group may need the interpreter once that is gone: the process then aborts."""
    (tmp_path / "ends.py").write_text("""
import atexit
import pathlib

def threads_left():
    print([name for at in pathlib.Path("/proc/self/task").glob("*/comm") if "gloo" in (name := at.read_text())])

atexit.register(threads_left)  # the first registered is called last
import train
from runs.processes import join_processes
ranks = join_processes("cpu")
model = train.nn.parallel.DistributedDataParallel(train.nn.Linear(2, 2))
model(ranks.add_up(train.torch.ones(1, 2))).sum().backward()
del model
""")
    done = command(tmp_path / "ends.py", cwd=tmp_path, launcher=TORCHRUN, PYTHONPATH=str(REPOSITORY))
    assert (done.returncode, "".join(done.stdout.split())) == (0, "[][]"), done.stderr  # lines may run together


def test_sharding_needs_torchrun(corpus, tmp_path):
    with pytest.raises(ValueError, match="sharding=fsdp: start the run with torchrun"):
        run(tmp_path, *SETTINGS, *corpus, FSDP)


@pytest.mark.parametrize(
    "pos", ["rope", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES if name != "rope")]
)
def test_two_and_three_processes_train_what_one_trains(pos, corpus, tmp_path):
    # Tables of few rows: with three processes, some have none of them.
    keys = {"shaw": ["pos.max_distance=3"], "t5": ["pos.buckets=4", "pos.max_distance=6"]}.get(pos, [])
    settings = [*SETTINGS, *corpus, f"pos={pos}", *keys]
    jobs = [start(tmp_path / "two", *settings, ranks=2), start(tmp_path / "sharded", *settings, FSDP, ranks=3)]
    run(tmp_path / "one", *settings)
    assert [set(end(processes)) for processes in jobs] == [{0}, {0}]
    for name in ("two", "sharded"):
        assert_close(tmp_path / name, tmp_path / "one")
        files = {path.name for path in (tmp_path / name).rglob("*")}
        assert files == {path.name for path in (tmp_path / "one").rglob("*")}


@pytest.mark.slow
def test_a_sharded_run_of_a_task_measures_first_and_goes_on(tmp_path):
    for steps in (3, 6):
        settings = [*SMALL, FSDP, "train.checkpoint_every=3", f"train.max_steps={steps}"]
        assert end(start(tmp_path / "run", *settings, ranks=2, resume=steps > 3)) == [0, 0]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_or_another_sharding(corpus, tmp_path):
    settings = (*SETTINGS, *corpus)
    assert end(start(tmp_path / "fsdp", *settings, FSDP, ranks=2)) == [0, 0]
    run(tmp_path / "none", *settings)
    states = [load_state(latest_checkpoint(tmp_path / name))["optimizer"] for name in ("fsdp", "none")]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for index, values in states[1]["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(states[0]["state"][index][key], value, rtol=1e-2, atol=1e-7)
    jobs = []
    for kind, how, ranks in [("fsdp", FSDP, 3), ("none", FSDP, 2), ("fsdp", "sharding=none", 2)]:
        folder = begun(tmp_path / kind, tmp_path / f"{kind}-{how}-{ranks}")
        jobs.append((folder, start(folder, *settings, how, ranks=ranks, resume=True)))
    alone = begun(tmp_path / "fsdp", tmp_path / "alone")
    run(alone, *settings, "sharding=none", resume=True)
    for folder, processes in jobs:
        assert set(end(processes)) == {0}
        assert_close(folder, tmp_path / "none")
    assert_close(alone, tmp_path / "none")


@pytest.mark.slow
def test_two_processes_train_alike_with_dropout_and_in_bf16(corpus, tmp_path):
    # Without biases: the gradient of the keys' is rounding and nothing else, which Adam makes as large as any other's.
    noisy = [*SETTINGS, *corpus, "model.dropout=0.2", "precision=bf16", "model.bias=false"]
    jobs = [start(tmp_path / how, *noisy, f"sharding={how}", ranks=2) for how in ("fsdp", "none")]
    assert [end(processes) for processes in jobs] == [[0, 0], [0, 0]]
    assert_close(tmp_path / "fsdp", tmp_path / "none", within=2e-3)  # bfloat16 rounds that coarsely


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_processes_one_of_which_is_killed(sharding, corpus, tmp_path):
    settings = [*SETTINGS, *corpus, f"sharding={sharding}", "train.checkpoint_every=1", "train.max_steps=40"]
    settings += ["train.eval_every=40", "model.dropout=0.1", "train.keep=1"]
    assert end(start(tmp_path / "whole", *settings, ranks=2)) == [0, 0]
    folder = tmp_path / "killed"
    processes = start(folder, *settings, ranks=2)
    while not list(folder.glob("checkpoint/*.safetensors")):
        time.sleep(0.01)
    processes[1].kill()
    codes = end(processes, within=60)  # the other does not wait for ever
    assert codes[1] == -9
    assert codes[0] not in (0, -9)
    finish(folder, *settings, ranks=2)
    assert_equal(folder, tmp_path / "whole")


@pytest.mark.slow
def test_torchrun_makes_one_run_folder(corpus, tmp_path):
    settings = [*TINY, *corpus, "train.micro_batch_size=1", "name=run"]
    run(tmp_path / "one", *settings)
    done = command("train.py", *settings, cwd=tmp_path, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    (two,) = tmp_path.glob("outputs/*")
    assert_close(two, tmp_path / "one")
    # a sweep's second job finds the processes joined already
    done = command("train.py", "-m", *settings, "seed=1,2", FSDP, cwd=tmp_path, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("outputs/*/extrapolation.json"))) == 3
    done = command("train.py", f"resume={two}", "train.max_steps=6", FSDP, cwd=tmp_path, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(two) if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert not same(weights(two), weights(tmp_path / "one"))


@pytest.mark.slow
def test_an_error_in_one_process_ends_the_job(corpus, tmp_path):
    settings = [*TINY, *corpus, "model.width=100"]
    begin = time.monotonic()
    done = command("train.py", *settings, cwd=tmp_path, launcher=TORCHRUN)
    assert done.returncode != 0
    assert "error: model.width=100" in done.stderr
    assert 'train.py", line' not in done.stderr  # no traceback of ours
    assert time.monotonic() - begin < 100
    assert not list(tmp_path.glob("outputs/*"))
