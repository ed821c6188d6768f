"""What train.py and eval.py share, and model/ must not know: settings, devices, processes, the run folder, wandb."""

from runs.devices import autocast, pick_device, pick_precision
from runs.folder import MetricsFile, latest_run, provenance, run_dir
from runs.processes import Ranks, all_jobs, join_processes
from runs.settings import CONFIGS, TrainConfig, checked, clear_errors, entry, meant, read_run, require
from runs.tracking import WandbRun, new_wandb_id, start_wandb, wandb_identity, wandb_mode

__all__ = [
    "CONFIGS",
    "MetricsFile",
    "Ranks",
    "TrainConfig",
    "WandbRun",
    "all_jobs",
    "autocast",
    "checked",
    "clear_errors",
    "entry",
    "join_processes",
    "latest_run",
    "meant",
    "new_wandb_id",
    "pick_device",
    "pick_precision",
    "provenance",
    "read_run",
    "require",
    "run_dir",
    "start_wandb",
    "wandb_identity",
    "wandb_mode",
]
