"""What train.py and eval.py share, and model/ must not know: settings, the run folder, devices, processes, wandb."""

from runs.devices import autocast, device_name, keep_memory, pick_device, pick_precision
from runs.folder import MetricsFile, latest_run, provenance, read_run
from runs.processes import Ranks, errors_as_messages, join_processes
from runs.settings import CONFIGS, TrainConfig, checked
from runs.tracking import new_wandb_id, start_wandb

__all__ = ["CONFIGS", "MetricsFile", "Ranks", "TrainConfig", "autocast", "checked", "device_name", "errors_as_messages"]
__all__ += ["join_processes", "keep_memory", "latest_run", "new_wandb_id", "pick_device", "pick_precision"]
__all__ += ["provenance", "read_run", "start_wandb"]
