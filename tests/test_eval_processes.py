"""Measuring with several processes: real ones, on the CPU, started by torchrun or by themselves.

As a command, `test_eval_processes.py <what to do> <folder>`, this file is what each process of such a job does.
"""

import contextlib
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import eval as eval_module
import runs
from measure import results, store
from measure.protocols import new_losses
from measure.results import Job, Scoring
from model import GPT
from runs.processes import LOST, JobError, all_jobs
from tests.helpers import small_model
from tests.trained import REPOSITORY, TINY, command, composed, measure, metrics, run
from train import Trainer

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
POSITIONS = {  # what is measured of each: past a learned table nothing, under dynamic scaling every length by itself
    "rope": ({"name": "rope"}, None),
    "learned": ({"name": "learned"}, None),
    "dynamic": ({"name": "rope"}, {"name": "dynamic", "factor": None}),
}
SCORINGS = {
    "both": {"protocols": ("sliding", "nonoverlapping"), "stride": 3, "by_position": True},
    "within": {"stride": 8, "documents": "within"},
    "across": {"protocols": ("nonoverlapping",), "documents": "across", "max_targets": 150},
    "one batch": {"lengths": (8,), "stride": 8, "max_targets": 32},
}
# Of 6 windows a step every number of processes has its share. The rate is too small to change a weight in float32, so
# that what is validated is the same bit for bit; what is trained is not, since gradients are summed in another order.
QUIET = ["device=cpu", "wandb.mode=disabled"]
SMALL = 100  # tokens a batch
STILL = ["train.batch_size=6", "train.lr=1e-30", "train.eval_every=2", "pos=rope", "name=still"]


class Text:
    """Token files of 10 documents of 40 tokens."""

    val, val_offsets = np.arange(400) ** 2 % 61, np.arange(0, 401, 40)
    meta, fingerprint = {"corpus": "text"}, "f"


class Tokens:
    name, bytes_per_token = "t", np.arange(61)


def job(pos: str, scoring: str) -> tuple[GPT, Job]:
    name, scaling = POSITIONS[pos]
    model = small_model(name, scaling=scaling, train_length=8)
    return model, Job(model.config, Text, Tokens, Scoring(**{"lengths": (8, 10, 24), "stride": 4, **SCORINGS[scoring]}))


def score_all(ranks: runs.Ranks) -> dict[str, np.ndarray]:
    found = {}
    for pos in POSITIONS:
        for scoring in SCORINGS:
            model, made = job(pos, scoring)
            losses, passed = new_losses(made.plan), []
            made.score(model, losses, done=passed.append, ranks=ranks)
            assert sum(passed) == made.plan.tokens
            assert not np.isnan(losses).any()
            found[f"{pos} {scoring}"] = losses
    return found


def work(folder: Path, ranks: runs.Ranks) -> None:
    """All that a job is asked for at once, since processes take long to start. Each process writes what it found."""
    results.BATCH_TOKENS = SMALL
    np.savez(folder / f"scored{ranks.rank}.npz", **score_all(ranks))

    # Each process finds other losses kept. Those of the first are what is known.
    eval_module.Losses = functools.partial(kept_of_rank, folder, ranks.rank)
    real, passes = GPT.forward, []
    GPT.forward = lambda *args, **kwargs: passes.append(1) or real(*args, **kwargs)
    settings = json.loads((folder / "measure.json").read_text())
    found = eval_module.evaluate_runs(composed(*settings, name="eval", schema=eval_module.EvalConfig), ranks)
    assert bool(found) == ranks.first
    assert not (folder / f"kept{ranks.rank}").exists() or ranks.rank < 2
    (folder / f"measured{ranks.rank}.json").write_text(json.dumps([len(passes), found]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "source_digest", lambda: f"program of {ranks.rank}")
        with pytest.raises(JobError, match="process 1: its weights, data, program"):
            eval_module.evaluate_runs(composed(*settings, name="eval", schema=eval_module.EvalConfig), ranks)

    config = composed(*json.loads((folder / "train.json").read_text()))
    nll = Trainer(config, runs.check_settings(config, ranks), folder / "still", ranks).train()
    (folder / f"nll{ranks.rank}.json").write_text(json.dumps(nll))

    assert ranks.share({"of": ranks.rank}) == {"of": 0}
    assert ranks.largest(ranks.rank) == ranks.world_size - 1
    # As if the odd processes were the second on their machine: first of all 0, then the other machines' first.
    place = runs.Ranks(ranks.rank, ranks.world_size, ranks.rank % 2)

    def act() -> int:
        time.sleep((0.4, 0.0, 0.2)[ranks.rank])  # the later its turn, the faster
        with open(folder / "turns", "a") as file:
            file.write(f"{ranks.rank}\n")
        return ranks.rank

    assert place.in_turn(act) == ranks.rank
    last = ranks.world_size - 1
    for who in (0, last):  # it fails in one, while the others wait for its value, in another block
        with pytest.raises(JobError) as caught:
            fill(ranks, who)
        assert str(caught.value) == ("the disk is full" if who == 0 else f"process {who}: the disk is full")
    assert ranks.share(5) == 5  # they still understand each other


def fill(ranks: runs.Ranks, who: int) -> None:
    with ranks.together():
        if ranks.rank == who:
            raise OSError("the disk is full")
        with ranks.together():
            ranks.share("value")


def kept_of_rank(folder: Path, rank: int, _: Path, *others) -> store.Losses:
    return store.Losses(folder / f"kept{rank}", *others)


def fail_alone(ranks: runs.Ranks) -> None:
    """An error that all have, which a sweep survives, then one that only the second has, while the first waits."""
    with contextlib.suppress(Exception), runs.clear_errors():
        raise ValueError("met by all")
    with runs.clear_errors():
        if ranks.rank == 1:
            raise ValueError("met by one")
        ranks.share(None)


def start(what: str, folder: Path, processes: int) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    launcher = (*TORCHRUN, str(processes), __file__, what, folder)
    return subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def alone(two_runs, corpus, tmp_path_factory):
    """What one process finds, in its folder, and the settings for the same by a job."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "BATCH_TOKENS", SMALL)
        np.savez(folder / "scored.npz", **score_all(runs.Ranks()))
        plans = [job(pos, scoring)[1].plan for pos in POSITIONS for scoring in SCORINGS]
        assert {(len(plan.batches) % 2, len(plan.batches) % 3) for plan in plans} >= {(1, 1), (1, 2)}
        assert min(len(plan.batches) for plan in plans) == 1
        patch.setattr(eval_module, "Losses", functools.partial(kept_of_rank, folder, 0))
        both = f"runs=[{two_runs / 'learned'},{two_runs / 'rope'}]"
        settings = [both, "scalings=[none,ntk]", "protocol=both", "lengths=[16,20,64]", *QUIET]
        settings.append(corpus[1].removeprefix("data."))  # a test's home is not there yet
        (folder / "measured.json").write_text(json.dumps(measure(*settings, f"out={folder / 'out'}")))
        run(folder / "still", *TINY, *corpus, *STILL)
    return folder, settings


@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_finds_what_one_finds(processes, alone, corpus, tmp_path):
    reference, settings = alone
    known = {}
    for path in (reference / "kept0").iterdir():
        values = np.load(path)
        for rank, changed in enumerate((values.copy(), np.full_like(values, 7.0))):
            if rank == 0:
                changed[len(changed) // 2 :] = np.nan
                known[path.name] = int(np.isnan(changed).sum())
            (tmp_path / f"kept{rank}").mkdir(exist_ok=True)
            np.save(tmp_path / f"kept{rank}" / path.name, changed)
    (tmp_path / "measure.json").write_text(json.dumps([*settings, f"out={tmp_path / 'out'}"]))
    (tmp_path / "still").mkdir()
    (tmp_path / "train.json").write_text(json.dumps([*TINY, *corpus, *STILL]))
    done = start("work", tmp_path, processes)
    assert done.returncode == 0, done.stderr
    expected = np.load(reference / "scored.npz")
    for rank in range(processes):
        found = np.load(tmp_path / f"scored{rank}.npz")
        assert set(found) == set(expected)
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    passes, found = zip(
        *(json.loads((tmp_path / f"measured{rank}.json").read_text()) for rank in range(processes)), strict=True
    )
    assert found[0] == json.loads((reference / "measured.json").read_text())
    assert len(set(passes)) == 1  # even where the last round has nothing for some
    for path in (reference / "kept0").iterdir():  # the first process keeps what is found, the others write nothing
        np.testing.assert_array_equal(np.load(tmp_path / "kept0" / path.name), np.load(path))
        assert (np.load(tmp_path / "kept1" / path.name) == 7).all()
    assert sorted(tmp_path.glob("kept*")) == [tmp_path / "kept0", tmp_path / "kept1"]
    assert (tmp_path / "out" / "report.html").exists()

    rows, of_one = metrics(tmp_path / "still"), metrics(reference / "still")
    validated = [row for row in of_one if "val/loss" in row or "extrapolation/length" in row]
    assert [row for row in rows if "val/loss" in row or "extrapolation/length" in row] == validated
    assert len({row["step"] for row in validated}) == 2
    losses = {json.loads((tmp_path / f"nll{rank}.json").read_text()) for rank in range(processes)}
    assert losses == {[row["val/loss"] for row in validated if "val/loss" in row][-1]}
    assert (tmp_path / "turns").read_text().split() == (["0", "1"] if processes == 2 else ["0", "2", "1"])


def test_an_error_is_said_once_and_one_that_only_one_process_has_names_it(tmp_path):
    for script, setting, words in (
        ("eval.py", "runs=nowhere", "error: nowhere: not a run folder"),
        ("train.py", "seed=-1", "error: seed=-1: must be at least 0"),
    ):
        done = command(script, setting, "device=cpu", cwd=tmp_path, launcher=(*TORCHRUN, "2"))
        assert done.returncode == 1
        ours, torchruns, _ = done.stderr.partition("torch/distributed/elastic")
        assert torchruns
        assert ours.count(words) == 1
        assert "Traceback" not in ours
        assert "process 1" not in ours
        assert done.stdout == ""
    done = start("fail", tmp_path, 2)
    assert done.returncode == 1
    assert done.stderr.count("error in process 1: met by one\n") == 1
    assert "met by all" not in done.stderr


def test_a_killed_process_ends_the_others_with_a_message_and_what_was_measured_is_kept(tmp_path):
    """Without torchrun, which ends the others itself; but only on its own machine, and this is about the others'."""
    rows = [{"text": " ".join(str(i * j % 997) for j in range(400))} for i in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"data.path={tmp_path / 'text.jsonl'}", f"data.cache={tmp_path / 'cache'}", "data.val_fraction=0.5"]
    run(tmp_path / "run", *TINY, *data, "pos=rope")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    cache = f"cache={tmp_path / 'cache'}"
    settings = [f"runs={tmp_path / 'run'}", cache, "stride=1", "max_targets=null", *QUIET]
    jobs = [
        subprocess.Popen(
            [sys.executable, __file__, "measure", *settings],
            cwd=tmp_path,
            env={**os.environ, **place, "PYTHONPATH": str(REPOSITORY), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    kept = tmp_path / "cache" / "measurements"
    try:
        while not list(kept.glob("*.npy")):
            assert [process.poll() for process in jobs] == [None, None]
            time.sleep(0.1)
        jobs[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        _, errors = jobs[0].communicate(timeout=60)
        assert time.monotonic() - killed < 60
    finally:
        for process in jobs:
            process.kill()
            process.wait()
    assert jobs[0].returncode == 1
    assert errors.count(LOST) == 1
    assert "Traceback" not in errors
    (path,) = kept.iterdir()
    values = np.load(path)
    assert 0 < np.isnan(values).sum() < len(values)


def test_nccl_is_not_left_where_the_others_may_wait_in_it(monkeypatch):
    left = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(backend))
    for backend in ("cpu:gloo,cuda:nccl", "gloo"):
        monkeypatch.setattr(dist, "get_backend_config", lambda backend=backend: backend)
        for status in (1, 143):  # an error of this process alone; a signal, which all have got
            with pytest.raises(SystemExit), all_jobs():
                raise SystemExit(status)
    assert left == ["cpu:gloo,cuda:nccl", "gloo", "gloo"]


def test_processes_of_a_machine_share_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"device=cuda:1: each process .*; use device=cuda$"):
        runs.pick_device("cuda:1", local_rank=1)


if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what == "measure":  # the command itself, but what is found is kept at once
        store.SAVE_EVERY = 0.0
        runpy.run_path(str(REPOSITORY / "eval.py"), run_name="__main__")
    else:
        with all_jobs():
            runs.processes.AGREEMENT = timedelta(seconds=4)
            ranks = runs.join_processes("cpu")
            work(Path(sys.argv[1]), ranks) if what == "work" else fail_alone(ranks)
