"""wandb: its history is that of metrics.jsonl whatever happens to the training, and its faults never stop the work.

Slower than other files: the faults are real, and what they do to a process' end shows only in a process of its own.
"""

import contextlib
import json
import os
import pty
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import runs
from runs import WandbRun, tracking
from tests import processes
from tests.trained import REPOSITORY, TINY, command, measure, metrics, records, run, same, weights
from train import Trainer

OFFLINE = [*(setting for setting in TINY if not setting.startswith("wandb")), "wandb.mode=offline"]
LONG = ["train.max_steps=400", "train.eval_every=400", "train.checkpoint_every=400"]
KEY = "0123456789abcdef" * 3


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What start_wandb sets in this process' environment is not there before, and not after."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")


def folders(outputs: Path, run_id: str = "") -> list[str]:
    """The names of wandb's folders there, of one run or of all."""
    return sorted(path.name for path in (outputs / "wandb").glob(f"*run-*-{run_id}*") if not path.is_symlink())


def wandb_id(folder: Path) -> str:
    return OmegaConf.load(folder / "config.yaml").provenance.wandb_id


def history(said: list[dict]) -> list[dict]:
    """The rows among wandb's records, without what wandb adds and what differs from machine to machine."""
    items = [record["history"]["item"] for record in said if record["type"] == "history"]
    assert [item["_step"] for item in items] == list(range(len(items)))
    return [{key: value for key, value in item.items() if not key.startswith(("_", "speed/"))} for item in items]


def placed(rows: list[dict]) -> list[dict]:
    """What wandb's history must be: the rows of metrics.jsonl without empty values, each with its place in its step."""
    seen, found = Counter(), []
    for row in rows:
        found.append({**{key: value for key, value in row.items() if value is not None}, "row": seen[row["step"]]})
        seen[row["step"]] += 1
    return found


def trained(folder: Path) -> list[dict]:
    """The history of the one training folder of a run."""
    (name,) = [name for name in folders(folder.parent, wandb_id(folder)) if "-train" in name]
    return history(records(folder.parent / "wandb" / name))


def services(parent: int) -> list[int]:
    """wandb's service processes of a process."""
    found = subprocess.run(["pgrep", "-P", str(parent), "wandb-core"], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


def start(*arguments, cwd: Path, before: str = "", env: dict | None = None, **keys) -> subprocess.Popen:
    """train.py in a process of its own; before: code that runs in it first."""
    script = str(REPOSITORY / "train.py")
    code = f"import runpy, sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.argv[0] = {script!r}; {before}"
    program = ["-c", f"{code}; runpy.run_path({script!r}, run_name='__main__')"] if before else [script]
    env = {**os.environ, **(env or {})}
    keys = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keys}
    return subprocess.Popen([sys.executable, *program, *arguments], cwd=cwd, env=env, text=True, **keys)


def await_(what, process, seconds: float = 60) -> None:
    """Until `what` is true, while the process lives."""
    alive, end = getattr(process, "is_alive", lambda: process.poll() is None), time.monotonic() + seconds
    while not what():
        assert alive()
        assert time.monotonic() < end
        time.sleep(0.005)


def warnings(folder: Path) -> list[str]:
    return re.findall(r"^\S+ \S+ WARNING (.*)$", (folder / "train.log").read_text(), re.MULTILINE)


def assert_whole(folder: Path, reference: Path) -> None:
    assert metrics(folder) == metrics(reference)
    assert same(weights(folder), weights(reference))


def all_steps(folder: Path) -> bool:
    """Whether a run of LONG wrote each of its steps just once, in order."""
    return [row["step"] for row in metrics(folder) if "train/loss" in row] == list(range(1, 401))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A run that nothing happened to, without wandb."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    run(folder, *TINY, *corpus)
    return folder


def test_a_run_that_begins_with_wandb_later_has_one_id(corpus, tmp_path, monkeypatch):
    """Its first start with wandb is killed before a checkpoint."""
    monkeypatch.setattr(runs, "start_wandb", lambda *_, **__: WandbRun())
    run(tmp_path, *TINY, *corpus)
    assert wandb_id(tmp_path) is None
    longer = [*OFFLINE, *corpus, "train.max_steps=6"]

    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, *longer, resume=True)
    first = wandb_id(tmp_path)
    run(tmp_path, *longer, resume=True)
    assert first
    assert wandb_id(tmp_path) == first


def test_history_after_kills_is_that_of_an_uninterrupted_run(corpus, tmp_path):
    """Killed in the middle of training, and again while wandb starts; measured in between."""
    settings = [*OFFLINE, *corpus, "train.max_steps=200", "train.eval_every=50", "train.checkpoint_every=5"]
    outputs = tmp_path / "outputs"
    folder = outputs / "run"
    (first,) = processes.start(folder, *settings)
    await_(lambda: list((folder / "checkpoint").glob("step_*5.safetensors")), first)
    time.sleep(seconds := random.uniform(0, 1))
    print(f"killed {seconds} s after the first checkpoint")
    first.kill()
    assert processes.end([first]) == [-signal.SIGKILL]
    run_id = wandb_id(folder)
    measure(f"runs={folder}", "wandb.mode=offline")
    (measurement,) = [name for name in folders(outputs, run_id) if "-train" not in name]

    before = folders(outputs, run_id)
    (second,) = processes.start(folder, *settings, resume=True)
    await_(lambda: folders(outputs, run_id) != before, second)
    second.kill()
    assert processes.end([second]) == [-signal.SIGKILL]

    run(folder, *settings, resume=True)
    assert len(folders(outputs, run_id)) == 2
    assert any("by_position/nll" in row for row in history(records(outputs / "wandb" / measurement)))
    other = run(tmp_path / "other" / "run", *settings).folder
    assert_whole(folder, other)
    assert trained(folder) == trained(other) == placed(metrics(folder))


def test_a_run_that_began_without_wandb_is_there_as_a_whole(corpus, tmp_path):
    folder = tmp_path / "run"
    for steps, mode in ((4, "disabled"), (6, "offline"), (8, "disabled"), (10, "offline")):
        settings = [*OFFLINE[:-1], *corpus, f"train.max_steps={steps}", f"wandb.mode={mode}"]
        run(folder, *settings, resume=steps > 4)
    assert [row["step"] for row in metrics(folder) if "train/loss" in row] == list(range(1, 11))
    assert trained(folder) == placed(metrics(folder))
    assert len(folders(tmp_path)) == 1


def test_many_rows_are_logged_anew_beside_the_work(tmp_path):
    """And what JSON or wandb cannot hold is left out."""
    rows = [
        {"step": step, "tokens": step * 64, "train/loss": 1 / (step + 1), "speed/mfu": None} for step in range(2000)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = OmegaConf.create({"mode": "offline", "project": "p"})
    begin = time.monotonic()
    wandb = tracking.start_wandb(settings, tmp_path / "run", "abcd1234", tmp_path / "metrics.jsonl")
    started = time.monotonic() - begin
    with wandb:
        wandb.log({"step": 2000, "train/loss": float("nan"), "val/loss": None, "val/perplexity": float("inf")})
    (name,) = folders(tmp_path)
    assert history(records(tmp_path / "wandb" / name)) == placed([*rows, {"step": 2000}])
    assert started < 1  # but for the import, seconds


def test_rows_that_the_server_has_are_not_sent_again(tmp_path):
    """The server is a stand-in: what a run taken up online holds in its summary."""

    sent, path = [], tmp_path / "metrics.jsonl"
    online = types.SimpleNamespace(summary={"step": 2, "row": 1}, log=sent.append)
    path.write_text('{"step": 1}\n{"step": 1, "val": 1}\n{"step": 2}\n')
    wandb = WandbRun(lambda: online, path)
    wandb.log({"step": 2, "val": 1})  # this row a killed process had sent
    wandb.log({"step": 2, "curve": 1})
    wandb.log({"step": 3})
    wandb.finish(failed=False)
    assert sent == [{"step": 2, "curve": 1, "row": 2}, {"step": 3, "row": 0}]


def test_earlier_folders_stay_where_the_new_one_lacks_a_row(corpus, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "run"
    run(folder, *OFFLINE, *corpus)
    real = tracking._start

    def lossy(*arguments, **keys):
        wandb = real(*arguments, **keys)
        log = wandb.log
        wandb.log = lambda values: values["step"] == 2 or log(values)
        return wandb

    monkeypatch.setattr(tracking, "_start", lossy)
    run(folder, *OFFLINE, *corpus, "train.max_steps=6", resume=True)
    assert "lacks rows of metrics.jsonl" in caplog.text
    assert [name.rpartition("-")[2] for name in folders(tmp_path)] == ["train1", "train2"]


@pytest.fixture(scope="module")
def black_hole():
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


AUTO = [setting for setting in TINY if not setting.startswith("wandb")]
ONLINE = {"WANDB_MODE": "online", "WANDB_API_KEY": KEY}


def test_a_server_that_refuses(corpus, whole, tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    for name, value in {**ONLINE, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()  # it reads the environment only once
    begun = time.monotonic()
    run(tmp_path / "run", *AUTO, *corpus)
    assert time.monotonic() - begun < 30
    wandb.teardown()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("wandb could not start online, and goes on offline: ")
    assert_whole(tmp_path / "run", whole)
    assert trained(tmp_path / "run") == placed(metrics(whole))
    assert len(folders(tmp_path)) == 1


def test_a_server_that_never_answers_and_one_without_a_key(corpus, whole, tmp_path, black_hole, home):
    """Without a key for its server, wandb would ask on the terminal; it must not."""
    environments = {
        "silent": {**ONLINE, "WANDB_BASE_URL": f"http://127.0.0.1:{black_hole}", "WANDB_INIT_TIMEOUT": "2"},
        "asking": {"WANDB_MODE": "online", "NETRC": str(home / "netrc"), "HOME": str(home)},
    }
    (home / ".config" / "wandb").mkdir(parents=True)
    (home / ".config" / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    (home / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    ours, theirs = pty.openpty()
    jobs, said = {}, b""
    for name, env in environments.items():
        terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs} if name == "asking" else {}
        jobs[name] = start(*AUTO, *corpus, f"hydra.run.dir={name}", cwd=tmp_path, env=env, **terminal)
    os.close(theirs)
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # where its other end is closed
        while part := terminal.read(4096):
            said += part
    for name, job in jobs.items():
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 0, (errors, said)
        assert "Traceback" not in (errors or said.decode())
        (warning,) = warnings(tmp_path / name)
        assert warning.startswith("wandb could not start online, and goes on offline: ")
        assert_whole(tmp_path / name, whole)
    assert b"choice" not in said
    assert len(folders(tmp_path)) == 2


def test_signals_while_wandb_starts(corpus, tmp_path, black_hole):
    env = {**ONLINE, "WANDB_BASE_URL": f"http://127.0.0.1:{black_hole}", "WANDB_INIT_TIMEOUT": "3"}
    keys = {"cwd": tmp_path, "env": env}
    # a shell's background jobs ignore Ctrl-C, and so would their children
    keys["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    numbers = (signal.SIGINT, signal.SIGTERM)
    jobs = {
        number: start(*AUTO, *corpus, "train.max_steps=100000", f"hydra.run.dir={int(number)}/run", **keys)
        for number in numbers
    }
    for number, job in jobs.items():
        folder = tmp_path / str(int(number))
        await_(lambda folder=folder: (folder / "wandb").exists() and (folder / "run" / "checkpoint").exists(), job)
        job.send_signal(number)
    for number, job in jobs.items():
        try:
            _, errors = job.communicate(timeout=60)
        finally:
            job.kill()
        assert job.returncode == 128 + number
        assert "Traceback" not in errors
        steps = [row["step"] for row in metrics(tmp_path / str(int(number)) / "run") if "train/loss" in row]
        assert steps == list(range(1, len(steps) + 1))


def reached(trainer: Trainer) -> None:
    """Wait until wandb has done all that it was given."""
    done = threading.Event()
    trainer.wandb._do(lambda run: done.set())
    assert done.wait(60)


def at_checkpoint(monkeypatch, action, number: int = 1) -> None:
    """action(trainer) before a run's first, second ... checkpoint, with a wandb that has caught up."""
    real, seen = Trainer._checkpoint, []

    def checkpoint(self):
        seen.append(self.step)
        if len(seen) == number:
            reached(self)
            action(self)
        real(self)

    monkeypatch.setattr(Trainer, "_checkpoint", checkpoint)


@pytest.mark.parametrize(
    ("fault", "checkpoint", "words"),
    [
        ("SIGKILL", 1, "wandb failed and is left out"),
        ("SIGKILL", 2, "wandb failed and is left out"),  # after the last step
        ("SIGSTOP", 1, "wandb does not answer and is left to itself"),
        ("folder removed", 1, "wandb failed and is left out"),
        ("folder removed", 2, "wandb failed and is left out"),
    ],
)
def test_what_becomes_of_wandb_does_not_touch_the_run(
    fault, checkpoint, words, corpus, whole, tmp_path, monkeypatch, caplog
):
    victims = []

    def action(trainer):
        if fault == "folder removed":
            shutil.rmtree(tmp_path / "wandb")
        else:
            victims.extend(services(os.getpid()))
            for pid in victims:
                os.kill(pid, getattr(signal, fault))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(tracking, "START", 1)
            patch.setattr(tracking, "FINISH", 1)
            patch.setenv("WANDB_INIT_TIMEOUT", "30")
            at_checkpoint(patch, action, checkpoint)
            run(tmp_path / "run", *OFFLINE, *corpus)
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warning.startswith(words)
        assert_whole(tmp_path / "run", whole)
        caplog.clear()
        run(tmp_path / "next" / "run", *OFFLINE, *corpus)  # in the same process, with a service of its own
        assert trained(tmp_path / "next" / "run") == placed(metrics(whole))
        assert "WARNING" not in caplog.text
    finally:
        for pid in victims if fault == "SIGSTOP" else ():  # one that was killed is gone
            os.kill(pid, signal.SIGKILL)


def a_file(wandb: Path):
    wandb.write_text("")


def not_writable(wandb: Path):
    wandb.symlink_to("/proc/self")  # where nobody makes folders, root included


def dangling(wandb: Path):
    wandb.symlink_to("nowhere/else")


@pytest.mark.parametrize("place", [a_file, not_writable, dangling])
def test_a_place_where_wandb_cannot_write(place, corpus, whole, tmp_path, caplog):
    place(tmp_path / "wandb")
    run(tmp_path / "run", *OFFLINE, *corpus)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("wandb failed and is left out")
    assert_whole(tmp_path / "run", whole)


def raises(monkeypatch, folder: Path):
    (folder / "wandb").mkdir()
    (folder / "wandb" / "__init__.py").write_text("raise RuntimeError('made for another python')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda patch, folder: patch.setitem(sys.modules, "wandb", None), "cannot be imported.*ModuleNotFoundError"),
        (raises, "cannot be imported.*made for another python"),
        (lambda patch, folder: patch.setitem(sys.modules, "wandb", types.ModuleType("wandb")), "no attribute 'setup'"),
    ],
    ids=["not there", "raises", "of another version"],
)
def test_a_wandb_that_does_not_work_here(break_it, words, corpus, whole, tmp_path, monkeypatch, caplog):
    (tmp_path / "library").mkdir()
    with monkeypatch.context() as patch:
        break_it(patch, tmp_path / "library")
        run(tmp_path / "run", *OFFLINE, *corpus)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(words, warning)
    assert_whole(tmp_path / "run", whole)


def test_the_exit_of_the_process_waits_for_nothing(corpus, tmp_path):
    """Its service killed, or hanging, in the middle: no traceback from wandb's exit handlers, and no wait."""
    settings = [*OFFLINE, *corpus, *LONG]
    before = "import runs.tracking; runs.tracking.START = runs.tracking.FINISH = 1"
    env = {"WANDB_INIT_TIMEOUT": "30"}
    jobs = {}
    for name in ("killed", "stopped"):
        with open(tmp_path / f"{name}.txt", "w") as said:  # a pipe would stay open as long as the service
            output = {"stdout": said, "stderr": said}
            jobs[name] = start(*settings, f"hydra.run.dir={name}", cwd=tmp_path, before=before, env=env, **output)
    victims = []
    try:
        for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            process = jobs[name]
            log = tmp_path / name / "train.log"
            await_(lambda log=log: log.exists() and "wandb    offline" in log.read_text(), process)
            (pid,) = services(process.pid)
            os.kill(pid, number)
            victims.append(pid)
        for name, process in jobs.items():
            assert process.wait(60) == 0
            assert "Traceback" not in (tmp_path / f"{name}.txt").read_text()
            (warning,) = warnings(tmp_path / name)
            assert warning.startswith("wandb ")
            assert all_steps(tmp_path / name)
    finally:
        for process in jobs.values():
            process.kill()
        for pid in victims[1:]:
            os.kill(pid, signal.SIGKILL)


def test_a_full_disk_under_wandb_alone(corpus, tmp_path):
    """A file system of 80 kB, mounted for this process only: in the middle of the training it is full."""
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a file system of his own")
    (tmp_path / "wandb").mkdir()
    settings = [*OFFLINE, *corpus, *LONG, "hydra.run.dir=run"]
    words = shlex.join([sys.executable, str(REPOSITORY / "train.py"), *settings])
    script = f"mount -t tmpfs -o size=80k none wandb && exec {words}"
    done = subprocess.run([*enter, "sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (warning,) = warnings(tmp_path / "run")
    assert "No space left on device" in warning
    assert all_steps(tmp_path / "run")


def test_every_job_of_a_sweep_has_a_wandb_run_of_its_own(corpus, tmp_path):
    """The second of three fails while it trains: it alone is a failed run."""
    jobs = ["name='lr${train.lr}'", "train.lr=1e-3,1e30,2e-3"]
    done = command("train.py", "-m", *OFFLINE, *corpus, *jobs, cwd=tmp_path)
    assert done.returncode == 1
    assert "step 2: the loss is nan" in done.stderr
    outputs, found = tmp_path / "outputs", {}
    assert len(folders(outputs)) == 3
    for path in (outputs / "wandb").glob("offline-run-*"):
        said = records(path)
        (begin,) = [record["run"] for record in said if record["type"] == "run"]
        (end,) = [record["exit"] for record in said if record["type"] == "exit"]
        (folder,) = outputs.glob(f"*_{begin['display_name']}")
        assert wandb_id(folder) == begin["run_id"]
        assert history(said) == placed(metrics(folder))
        found[begin["display_name"]] = end["exit_code"]
    assert found == {"lr0.001": 0, "lr1e+30": 1, "lr0.002": 0}
    one = run(tmp_path / "alone", *TINY, *corpus, "train.lr=2e-3")
    (last,) = outputs.glob("*_lr0.002")
    assert_whole(last, one.folder)
