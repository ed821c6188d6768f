"""wandb: its history is that of metrics.jsonl whatever happens to the training, and its faults never stop the work.

Slower than other files, since the faults are real: processes are killed and started again, servers do not answer.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from runs import WandbRun, tracking
from tests.trained import REPOSITORY, TINY, command, measure, metrics, records, run, same, weights
from train import Trainer

OFFLINE = [*(setting for setting in TINY if not setting.startswith("wandb")), "wandb.mode=offline"]
LONG = ["train.max_steps=400", "train.eval_every=400", "train.checkpoint_every=400"]
KEY = "0123456789abcdef" * 3


@pytest.fixture(autouse=True)
def errors_stay_here(monkeypatch):
    """start_wandb sets it for its process; here, only for the test."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def folders(outputs: Path, run_id: str = "") -> list[str]:
    """The names of wandb's folders there, of one run or of all."""
    return sorted(path.name for path in (outputs / "wandb").glob(f"*run-*-{run_id}*") if not path.is_symlink())


def wandb_id(folder: Path) -> str:
    return OmegaConf.load(folder / "config.yaml").provenance.wandb_id


def history(wandb_folder: Path) -> list[dict]:
    """The rows that wandb's own reader finds, without what wandb adds and what differs from machine to machine."""
    items = [record["history"]["item"] for record in records(wandb_folder) if record["type"] == "history"]
    assert [item["_step"] for item in items] == list(range(len(items)))
    return [{key: value for key, value in item.items() if not key.startswith(("_", "speed/"))} for item in items]


def numbered(folder: Path) -> list[dict]:
    """What wandb's history must be: the rows of metrics.jsonl and their numbers, without empty values."""
    rows = [{key: value for key, value in row.items() if value is not None} for row in metrics(folder)]
    return [{**row, "row": number} for number, row in enumerate(rows)]


def trained(folder: Path) -> list[dict]:
    """The history of the one training folder of a run."""
    (name,) = [name for name in folders(folder.parent, wandb_id(folder)) if "-train" in name]
    return history(folder.parent / "wandb" / name)


def services(parent: int) -> list[int]:
    """wandb's service processes of a process."""
    found = subprocess.run(["pgrep", "-P", str(parent), "wandb-core"], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


def start(*arguments, cwd: Path, before: str = "", env: dict | None = None, **keys) -> subprocess.Popen:
    """train.py in a process of its own; before: code that runs in it first."""
    script = str(REPOSITORY / "train.py")
    code = f"import runpy, sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.argv[0] = {script!r}; {before}"
    program = ["-c", f"{code}; runpy.run_path({script!r}, run_name='__main__')"] if before else [script]
    keys = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keys}
    env = {**os.environ, **(env or {})}
    return subprocess.Popen([sys.executable, *program, *arguments], cwd=cwd, env=env, text=True, **keys)


def await_(what, process: subprocess.Popen, seconds: float = 60):
    """The first true value of `what`, while the process lives."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


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


def test_history_after_kills_is_that_of_an_uninterrupted_run(corpus, tmp_path):
    """Killed in the middle of training, and again while wandb starts; measured in between."""
    settings = [*OFFLINE, *corpus, "train.max_steps=300", "train.eval_every=50", "train.checkpoint_every=5"]
    folder = tmp_path / "outputs" / "run"
    first = start(*settings, f"hydra.run.dir={folder}", cwd=tmp_path)
    await_(lambda: list((folder / "checkpoint").glob("step_*5.safetensors")), first)
    time.sleep(seconds := random.uniform(0, 1))
    print(f"killed {seconds} s after the first checkpoint")
    assert first.poll() is None
    first.kill()
    first.communicate()
    run_id = wandb_id(folder)
    assert len(folders(tmp_path / "outputs", run_id)) <= 1  # none, where it was killed before wandb's start
    measure(f"runs={folder}", "wandb.mode=offline")
    (measurement,) = [name for name in folders(tmp_path / "outputs", run_id) if "-train" not in name]

    before = len(folders(tmp_path / "outputs", run_id))
    second = start(f"resume={folder}", cwd=tmp_path)
    await_(lambda: len(folders(tmp_path / "outputs", run_id)) > before, second)
    second.kill()
    second.communicate()

    run(folder, *settings, resume=True)
    left = folders(tmp_path / "outputs", run_id)
    assert len(left) == 2
    assert measurement in left
    assert any("by_position/nll" in row for row in history(tmp_path / "outputs" / "wandb" / measurement))

    run(tmp_path / "other" / "run", *settings)
    assert_whole(folder, tmp_path / "other" / "run")
    assert trained(folder) == trained(tmp_path / "other" / "run") == numbered(folder)


def test_a_run_that_began_without_wandb_is_there_as_a_whole(corpus, tmp_path):
    folder = tmp_path / "run"
    for steps, mode in ((4, "disabled"), (6, "offline"), (8, "disabled"), (10, "offline")):
        settings = [*OFFLINE[:-1], *corpus, f"train.max_steps={steps}", f"wandb.mode={mode}"]
        run(folder, *settings, resume=steps > 4)
    assert len(numbered(folder)) == 10 + 4 * 6  # steps, and four ends: a validation and its curve
    assert trained(folder) == numbered(folder)
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
    kept = [{key: value for key, value in row.items() if value is not None} for row in [*rows, {"step": 2000}]]
    expected = [{**row, "row": number} for number, row in enumerate(kept)]
    assert history(tmp_path / "wandb" / name) == expected
    assert started < 1  # but for the import, seconds


def test_rows_that_the_server_has_are_not_sent_again(tmp_path):
    """The server is a stand-in: what a run taken up online holds in its summary."""

    sent = []
    online = types.SimpleNamespace(summary={"row": 3}, log=sent.append)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    wandb = WandbRun(lambda: online, tmp_path / "metrics.jsonl")
    for step in (4, 5, 6):  # of these, a killed training had sent the first
        wandb.log({"step": step})
    wandb.finish(failed=False)
    assert sent == [{"step": 5, "row": 4}, {"step": 6, "row": 5}]


def test_earlier_folders_stay_where_the_new_one_lacks_a_row(corpus, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "run"
    run(folder, *OFFLINE, *corpus)
    real = tracking._start

    def lossy(*arguments, **keys):
        wandb = real(*arguments, **keys)
        log = wandb.log
        wandb.log = lambda values: values["row"] == 2 or log(values)
        return wandb

    monkeypatch.setattr(tracking, "_start", lossy)
    run(folder, *OFFLINE, *corpus, "train.max_steps=6", resume=True)
    assert "lacks rows of metrics.jsonl" in caplog.text
    assert [name.rpartition("-")[2] for name in folders(tmp_path)] == ["train1", "train2"]


@pytest.fixture(scope="module")
def black_hole():
    """The port of a server that accepts connections and never answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


def test_a_server_out_of_reach_costs_a_warning(corpus, whole, tmp_path, black_hole, home):
    """Refused, silent, and one that wandb has no key for: it would ask on a terminal, if it could."""
    import pty

    (home / ".config" / "wandb").mkdir(parents=True)
    netrc = home / "netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    online = {"WANDB_MODE": "online", "WANDB_INIT_TIMEOUT": "2", "HOME": str(home)}
    keyed = {**online, "WANDB_API_KEY": KEY}
    environments = {
        "refused": {**keyed, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        "silent": {**keyed, "WANDB_BASE_URL": f"http://127.0.0.1:{black_hole}"},
        "asking": {**online, "NETRC": str(netrc)},
    }
    (home / ".config" / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    ours, theirs = pty.openpty()
    processes = {}
    for name, env in environments.items():
        terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs} if name == "asking" else {}
        auto = [setting for setting in TINY if not setting.startswith("wandb")]
        processes[name] = start(*auto, *corpus, f"hydra.run.dir={name}", cwd=tmp_path, env=env, **terminal)
    os.close(theirs)
    said = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(4096):
                said += part
        except OSError:  # its other end is closed
            pass
    for name, process in processes.items():
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, (errors, said)
        assert "Traceback" not in (errors or said.decode())
        (warning,) = warnings(tmp_path / name)
        assert warning.startswith("wandb could not start online, and goes on offline: ")
        assert_whole(tmp_path / name, whole)
        assert trained(tmp_path / name) == numbered(whole)
    assert len(folders(tmp_path)) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_wandb_starts(number, corpus, tmp_path, black_hole):
    env = {"WANDB_MODE": "online", "WANDB_API_KEY": KEY, "WANDB_BASE_URL": f"http://127.0.0.1:{black_hole}"}
    settings = [*(setting for setting in TINY if not setting.startswith("wandb")), *corpus, "train.max_steps=100000"]
    process = start(
        *settings,
        "hydra.run.dir=run",
        cwd=tmp_path,
        env={**env, "WANDB_INIT_TIMEOUT": "4"},
        # a shell's background jobs ignore Ctrl-C, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        await_(lambda: (tmp_path / "wandb").exists() and (tmp_path / "run" / "checkpoint").exists(), process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode in (128 + number, -number)
    assert "Traceback" not in errors
    steps = [row["step"] for row in metrics(tmp_path / "run") if "train/loss" in row]
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
        run(tmp_path / "next" / "run", *OFFLINE, *corpus)  # in the same process, with a service of its own
        assert trained(tmp_path / "next" / "run") == numbered(whole)
    finally:
        for pid in victims:
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
    processes = {}
    for name in ("killed", "stopped"):
        with open(tmp_path / f"{name}.txt", "w") as said:  # a pipe would stay open as long as the service
            output = {"stdout": said, "stderr": said}
            processes[name] = start(*settings, f"hydra.run.dir={name}", cwd=tmp_path, before=before, env=env, **output)
    victims = []
    try:
        for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            process = processes[name]
            log = tmp_path / name / "train.log"
            await_(lambda log=log: log.exists() and "wandb    offline" in log.read_text(), process)
            (pid,) = services(process.pid)
            os.kill(pid, number)
            victims.append(pid)
        for name, process in processes.items():
            assert process.wait(60) == 0
            assert "Traceback" not in (tmp_path / f"{name}.txt").read_text()
            (warning,) = warnings(tmp_path / name)
            assert warning.startswith("wandb ")
            assert all_steps(tmp_path / name)
    finally:
        for process in processes.values():
            process.kill()
        for pid in victims[1:]:
            os.kill(pid, signal.SIGKILL)


def test_a_full_disk_under_wandb_alone(corpus, tmp_path):
    """A file system of 150 kB, mounted for this process only: in the middle of the training it is full."""
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a file system of his own")
    (tmp_path / "wandb").mkdir()
    settings = [*OFFLINE, *corpus, *LONG, "hydra.run.dir=run"]
    words = shlex.join([sys.executable, str(REPOSITORY / "train.py"), *settings])
    script = f"mount -t tmpfs -o size=150k none wandb && exec {words}"
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
        (exit_,) = [record["exit"] for record in said if record["type"] == "exit"]
        assert begin["config"]["update"]["name"] == begin["display_name"]
        found[begin["display_name"]] = (begin["run_id"], exit_.get("exit_code", 0))
    assert {name: code for name, (_, code) in found.items()} == {"lr0.001": 0, "lr1e+30": 1, "lr0.002": 0}
    for name, (run_id, _) in found.items():
        (folder,) = outputs.glob(f"*_{name}")
        assert wandb_id(folder) == run_id
        assert trained(folder) == numbered(folder)
    one = run(tmp_path / "alone", *TINY, *corpus, "train.lr=2e-3")
    (last,) = outputs.glob("*_lr0.002")
    assert_whole(last, one.folder)
