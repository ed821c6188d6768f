"""What train.py and eval.py share, and model/ must not know: settings, devices, processes, the run folder, wandb."""

from runs.checks import check_settings
from runs.devices import autocast, check_flex, device_name, pick_device, pick_precision, set_numerics
from runs.folder import MetricsFile, is_reported, latest_run, only_one, provenance, run_dir
from runs.origin import agreement, from_source, repeated_config, resumed_config, start_from
from runs.processes import Ranks, all_jobs, join_processes
from runs.settings import CONFIGS, TrainConfig, checked, clear_errors, entry, meant, named, read_run, require
from runs.sharding import averaging, check_sharding, load_optimizer, shard, whole_weights, write_shards
from runs.signals import Stop, Stopped
from runs.tracking import WandbRun, new_wandb_id, start_wandb, wandb_identity, wandb_mode
from runs.trained import Run, chosen_checkpoint, read_runs, run_folders
from runs.trust import check_source, redacted

__all__ = [
    "CONFIGS",
    "MetricsFile",
    "Ranks",
    "Run",
    "Stop",
    "Stopped",
    "TrainConfig",
    "WandbRun",
    "agreement",
    "all_jobs",
    "autocast",
    "averaging",
    "check_flex",
    "check_settings",
    "check_sharding",
    "check_source",
    "checked",
    "chosen_checkpoint",
    "clear_errors",
    "device_name",
    "entry",
    "from_source",
    "is_reported",
    "join_processes",
    "latest_run",
    "load_optimizer",
    "meant",
    "named",
    "new_wandb_id",
    "only_one",
    "pick_device",
    "pick_precision",
    "provenance",
    "read_run",
    "read_runs",
    "redacted",
    "repeated_config",
    "require",
    "resumed_config",
    "run_dir",
    "run_folders",
    "set_numerics",
    "shard",
    "start_from",
    "start_wandb",
    "wandb_identity",
    "wandb_mode",
    "whole_weights",
    "write_shards",
]
