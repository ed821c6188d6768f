"""wandb, or nothing at all; a failing wandb never stops the work."""

import contextlib
import json
import logging
import netrc
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import DictConfig

from measure.statistics import finite
from runs.trust import redacted_argv

log = logging.getLogger("ropewalk")

START = 30  # seconds that a server has to answer when a run starts; then the run is kept offline
FINISH = 60  # seconds to send what is left when it ends; what is not sent by then stays in wandb's folder


def _logged_in() -> bool:
    """Whether wandb would find credentials without asking for them."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    for path in (os.environ["NETRC"],) if os.environ.get("NETRC") else ("~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
    return False


class WandbRun:
    """A wandb run, or nothing at all without `start`, which makes one. A failing wandb never stops the work.

    A thread of its own talks to wandb: neither a server that cannot be reached nor a service that hangs costs the work
    any time, and whatever fails is one warning.
    """

    def __init__(self, start: Callable[[], Any] | None = None, metrics: Path | None = None):
        """metrics: the metrics.jsonl of a training. Every row of it is then logged once, with its place in its step.

        A run that is taken up logs the rows that it kept as well, but for those that the server has: wandb's history is
        a function of the file, however often the training was killed.
        """
        self._actions: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._places: list[tuple[int, int]] | None = None if metrics is None else []  # of all rows: (step, row)
        self._held = (-1, -1)  # the last place that the server has
        self._given_up = False
        if start is None:
            return
        self._thread = threading.Thread(target=self._work, args=(start,), name="wandb", daemon=True)
        self._thread.start()
        if metrics is not None:
            for line in metrics.read_text(encoding="utf-8").splitlines():
                self.log(json.loads(line))

    def __enter__(self) -> "WandbRun":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish(failed=kind is not None)

    def log(self, row: dict) -> None:
        """Log what is there: None is left out, as wandb would show it as a value."""
        values = {key: value for key, value in finite(row).items() if value is not None}
        if self._places is not None:
            step, number = self._places[-1] if self._places else (-1, 0)
            values["row"] = number + 1 if values["step"] == step else 0
            self._places.append((values["step"], values["row"]))
        self._do(lambda run: self._send(run, values))

    def summary(self, values: dict) -> None:
        self._do(lambda run: run.summary.update(values))

    def table(self, name: str, columns: list[str], rows: list[list]) -> None:
        """A table of its own panel; nothing for no rows."""

        def log_table(run: Any) -> None:
            import wandb

            run.log({name: wandb.Table(columns=columns, data=rows)})

        if rows:
            self._do(log_table)

    def finish(self, failed: bool) -> None:
        """Close it, with all that was logged; a wandb that takes longer than 2 · START + FINISH is left to itself."""
        if self._thread is None:
            return
        self._do(lambda run: self._close(run, failed))
        self._actions.put(None)
        thread, self._thread = self._thread, None
        try:
            thread.join(2 * START + FINISH)
            if thread.is_alive():
                log.warning("wandb does not answer and is left to itself (metrics.jsonl is whole)")
        finally:  # a second Ctrl-C too must not wait for wandb
            if thread.is_alive():
                self._given_up = True
                _leave()

    def _do(self, action: Callable[[Any], None]) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._actions.put(action)

    def _send(self, run: Any, values: dict) -> None:
        if self._places is None or (values["step"], values["row"]) > self._held:
            run.log(values)

    def _work(self, start: Callable[[], Any]) -> None:
        try:
            run = start()
            if self._places is not None:
                self._held = (run.summary.get("step", -1), run.summary.get("row", -1))
            while action := self._actions.get():
                action(run)
        except (Exception, SystemExit) as error:
            if not self._given_up:
                log.warning("wandb failed and is left out from here on: %r (metrics.jsonl goes on)", error)
                _leave()

    def _close(self, run: Any, failed: bool) -> None:
        folder = Path(run.dir).parent
        run.finish(exit_code=1 if failed else 0)
        with tempfile.TemporaryFile(dir=folder) as probe:  # wandb does not say that its disk is full or its folder gone
            probe.write(bytes(2**12))
        if self._places is not None:
            _supersede(folder, run.id, [place for place in self._places if place > self._held])


def _leave() -> None:
    """Part from wandb's service without waiting for it: neither the next run nor this process' end may meet it."""

    def teardown() -> None:
        with contextlib.suppress(Exception, SystemExit):
            sys.modules["wandb"].teardown()

    thread = threading.Thread(target=teardown, daemon=True)
    thread.start()
    thread.join(1)  # by then it is forgotten, if not gone


def _starts(folder: Path, run_id: str) -> dict[Path, int]:
    """wandb's folders in `folder` that are of the training's starts, not of a measurement, and the starts' numbers."""
    name = re.compile(rf"(?:offline-)?run-\d+_\d+-{re.escape(run_id)}-train(\d+)")
    return {path: int(found[1]) for path in folder.glob("*") if (found := name.fullmatch(path.name))}


def _supersede(folder: Path, run_id: str, places: list[tuple[int, int]]) -> None:
    """Remove the offline folders of this training's earlier starts, once wandb's own reader finds all rows in this one.

    Raises OSError where it does not.
    """
    starts = [path for path in _starts(folder.parent, run_id) if path.name.startswith("offline") and path != folder]
    if not starts:
        return
    reader = [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    said = subprocess.run(reader, capture_output=True, text=True, timeout=FINISH, check=True).stdout
    records = [json.loads(line) for line in said.splitlines()]
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    if [(item["step"], item["row"]) for item in items] != places:
        raise OSError(f"{folder} lacks rows of metrics.jsonl; the folders of earlier starts are kept")
    for path in starts:
        shutil.rmtree(path, ignore_errors=True)


def wandb_mode(mode: str) -> str:
    """online, offline or disabled. auto: what WANDB_MODE says, else online when logged in, else offline. Never asks.

    Raises ValueError for a mode that is not known, and for `online` without a login.
    """
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
    if mode not in ("online", "offline", "disabled"):
        raise ValueError(f"wandb.mode (or WANDB_MODE)={mode!r}: use auto, online, offline or disabled")
    if mode == "online" and not _logged_in():
        raise ValueError("wandb.mode=online: not logged in; run `wandb login`, or use wandb.mode=offline")
    return mode


def new_wandb_id() -> str:
    """An id for a new wandb run; in a wandb sweep its agent has given one."""
    if os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"):
        return os.environ["WANDB_RUN_ID"]
    return uuid.uuid4().hex[:8]


def wandb_identity(config: DictConfig) -> dict:
    """How a run is found among others: runs of one scheme are a group, its seeds the runs in it."""
    pos = config.pos.name + ("_linear" if config.model.get("attention") == "linear" else "")
    scaled = config.scaling is not None and config.scaling.name != "none"
    group = config.wandb.group or (f"{pos}_{config.scaling.name}" if scaled else pos)
    tags = [f"pos={pos}", f"layers={config.model.n_layer}", f"train_length={config.model.train_length}"]
    return {"name": config.name, "group": group, "job_type": "train", "tags": [*tags, *config.wandb.tags]}


def start_wandb(
    settings: DictConfig, run_folder: Path, run_id: str | None, metrics: Path | None = None, **init: Any
) -> WandbRun:
    """Start or take up (by its id) a wandb run whose files lie in `wandb/` beside the run folder. Without id: none.

    metrics: the metrics.jsonl of a training, for WandbRun. Returns at once: it is started beside the work.
    """
    mode = wandb_mode(settings.mode)
    if mode == "disabled" or run_id is None:
        return WandbRun()
    # Its reports of its own errors wait at the process' end for a server, and go out from offline runs too.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb  # noqa: F401 (here, so that no two threads import at once)
    except Exception as error:
        log.warning("wandb cannot be imported and is left out: %r (metrics.jsonl goes on)", error)
        return WandbRun()
    init |= {"project": settings.project, "dir": str(run_folder.resolve().parent), "id": run_id}
    return WandbRun(lambda: _start(mode, init, training=metrics is not None), metrics)


def _start(mode: str, init: dict, training: bool) -> Any:
    """A wandb run: as `mode` says or, where that fails, offline. Raises what wandb raises where that fails too."""
    import wandb

    with redacted_argv():  # it notes the command line by itself
        wandb.setup(wandb.Settings(silent=True))  # without a terminal: it must not ask for an account
    folder, limits = Path(init["dir"]) / "wandb", {"finish_timeout": FINISH, "finish_timeout_raises": True}
    # What it would note of git has the user of the remote's address, and the changes that are not committed.
    limits["disable_git"] = True
    limits |= {"init_timeout": float(os.environ.get("WANDB_INIT_TIMEOUT", START)), "use_dot_wandb": False}
    number = 1 + max(_starts(folder, init["id"]).values(), default=0)
    if training:  # its folders are known by their names, from the moment they are there
        limits["x_sync_dir_suffix"] = f"train{number}"
    for attempt in dict.fromkeys((mode, "offline")):
        options = {"mode": attempt, "resume": "allow" if attempt == "online" else None, "reinit": "create_new"}
        try:
            with redacted_argv():  # it notes the command line by itself
                run = wandb.init(settings=wandb.Settings(silent=True, console="off", **limits), **options, **init)
            break
        except Exception as error:
            if attempt == "offline":
                raise
            log.warning("wandb could not start online, and goes on offline: %s", " ".join(str(error).split()))
            _leave()
            for path, start in _starts(folder, init["id"]).items():
                if start == number:
                    shutil.rmtree(path, ignore_errors=True)
    run.define_metric("row", hidden=True)
    run.define_metric("tokens")
    for prefix in ("train", "val", "speed"):
        run.define_metric(f"{prefix}/*", step_metric="tokens")
    for prefix, x in (("extrapolation", "length"), ("by_position", "position"), ("recall", "distance")):
        run.define_metric(f"{prefix}/{x}")
        run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/{x}")
    where = run.url if attempt == "online" else f"offline in {Path(run.dir).parents[1]}"
    log.info("wandb    %s, run %s", where, run.id)
    return run
