"""wandb: where a run is logged besides its metrics.jsonl."""

import logging
import os
import re
import shlex
import uuid
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

log = logging.getLogger("ropewalk")

MODES = ("auto", "online", "offline", "disabled")
# Metrics by their prefix, and what they are drawn over.
AXES = {"train": "tokens", "val": "tokens", "speed": "tokens", "extrapolation": "extrapolation/length"}
AXES |= {"by_position": "by_position/position", "recall": "recall/distance"}


def new_wandb_id(name: str = "run") -> str:
    """The id of a new wandb run: that of a sweep's agent, else a name (wandb leet lists ids) and a random ending."""
    if os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"):
        return os.environ["WANDB_RUN_ID"]
    return f"{re.sub(r'[^A-Za-z0-9.]+', '_', name)}-{uuid.uuid4().hex[:6]}"


def wandb_identity(config: DictConfig, pos: str) -> dict:
    """A training's name, group and tags: runs of one scheme, named pos, are a group."""
    scaled = config.scaling is not None and config.scaling.name != "none"
    group = config.wandb.group or (f"{pos}_{config.scaling.name}" if scaled else pos)
    tags = [f"pos={pos}", f"layers={config.model.n_layer}", f"train_length={config.model.train_length}"]
    return {"name": config.name, "group": group, "tags": [*tags, *config.wandb.tags]}


@cache
def is_logged_in() -> bool:
    """Asked once: after a run has begun, wandb warns at the question."""
    import wandb

    return wandb.login(prompt=False, verify=False)


def start_wandb(
    settings: DictConfig, folder: Path, run_id: str, config: dict | None = None, job_type: str = "train", **init: Any
) -> Any:
    """Start the wandb run of this id, or continue it; its files lie in `wandb/` beside the run folder.

    settings: mode and project. Mode `auto` is what WANDB_MODE says, else online when logged in, else offline. Where
    wandb cannot start, the run is offline, or else disabled, with one warning. init: as of wandb.init.
    """
    import wandb  # takes over half a second

    mode = os.environ.get("WANDB_MODE", "auto") if settings.mode == "auto" else settings.mode
    logged_in = mode in ("auto", "online") and is_logged_in()
    if mode == "auto":
        mode = "online" if logged_in else "offline"
    # A run that ends waits for a server 60 seconds; what is not sent by then stays in wandb's folder.
    quiet = wandb.Settings(silent=True, console="off", finish_timeout=60, disable_git=True)
    init |= {"id": run_id, "config": config, "job_type": job_type, "project": settings.project, "settings": quiet}
    init |= {"dir": str(folder.resolve().parent), "reinit": "create_new"}
    failures = []
    for attempt in dict.fromkeys((mode, "offline", "disabled")):
        try:
            if attempt == "online" and not logged_in:
                raise ValueError("not logged in; run `wandb login`")
            run = wandb.init(mode=attempt, resume="allow" if attempt == "online" else None, **init)
            break
        except Exception as error:  # whatever a server, a proxy or a full disk makes wandb raise
            failures.append(str(error))
            wandb.teardown()  # else its service still holds the run's id
    if failures:
        log.warning("wandb goes on %s (metrics.jsonl has every number): %s", attempt, "; ".join(failures))
    for axis in ("step", *dict.fromkeys(AXES.values())):
        run.define_metric(axis, hidden=True)  # no chart of its own
    for prefix, axis in AXES.items():
        run.define_metric(f"{prefix}/*", step_metric=axis)
    if attempt != "disabled":
        where = run.url if attempt == "online" else f"offline: wandb leet {shlex.quote(init['dir'] + '/wandb')}"
        log.info("wandb    run %s, %s", run.id, where)
    return run
