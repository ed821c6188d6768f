"""wandb, or nothing at all; a failing wandb never stops the work."""

import contextlib
import logging
import netrc
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from measure.statistics import finite

log = logging.getLogger("ropewalk")


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


@dataclass
class WandbRun:
    """A wandb run, or nothing at all where wandb.mode=disabled. A failing wandb never stops the work."""

    run: Any = None

    def log(self, row: dict) -> None:
        """Log what is there: None is left out, as wandb would show it as a value."""
        self._call(lambda: self.run.log({key: value for key, value in finite(row).items() if value is not None}))

    def summary(self, values: dict) -> None:
        self._call(lambda: self.run.summary.update(values))

    def table(self, name: str, columns: list[str], rows: list[list]) -> None:
        """A table of its own panel; nothing for no rows."""
        if self.run is not None and rows:
            import wandb

            self._call(lambda: self.run.log({name: wandb.Table(columns=columns, data=rows)}))

    def finish(self, failed: bool) -> None:
        self._call(lambda: self.run.finish(exit_code=1 if failed else 0))

    def _call(self, action: Callable[[], None]) -> None:
        if self.run is None:
            return
        try:
            action()
        except Exception as error:
            self.run = None
            log.warning("wandb failed and is left out from here on: %s (metrics.jsonl goes on)", error)


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


def start_wandb(settings: DictConfig, run_folder: Path, run_id: str | None, **init: Any) -> WandbRun:
    """Start or take up (by its id) a wandb run whose files lie in `wandb/` beside the run folder. Without id: none."""
    mode = wandb_mode(settings.mode)
    if mode == "disabled" or run_id is None:
        return WandbRun()
    import wandb

    folder = run_folder.resolve().parent
    init |= {"project": settings.project, "dir": str(folder), "id": run_id}
    init["settings"] = wandb.Settings(silent=True, console="off", init_timeout=60)
    for attempt in dict.fromkeys((mode, "offline")):
        try:
            run = wandb.init(mode=attempt, resume="allow" if attempt == "online" else None, **init)
            break
        except Exception as error:
            log.warning("wandb could not start %s: %s (metrics.jsonl goes on)", attempt, error)
    else:
        return WandbRun()
    run.define_metric("tokens")
    for prefix in ("train", "val", "speed"):
        run.define_metric(f"{prefix}/*", step_metric="tokens")
    for prefix, x in (("extrapolation", "length"), ("by_position", "position"), ("recall", "distance")):
        run.define_metric(f"{prefix}/{x}")
        run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/{x}")
    where = run.url if attempt == "online" else f"offline in {folder / 'wandb'}"
    log.info("wandb    %s, run %s", where, run.id)
    return WandbRun(run)
