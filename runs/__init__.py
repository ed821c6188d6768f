"""What train.py and eval.py share, and model/ must not know: settings, the run folder, devices, processes, wandb."""

from runs.devices import autocast, pick_device, pick_precision
from runs.folder import MetricsFile, latest_run, read_run
from runs.processes import Ranks, errors_as_messages, join_processes
from runs.settings import CONFIGS, TrainConfig, checked
from runs.tracking import start_wandb

__all__ = ["CONFIGS", "MetricsFile", "Ranks", "TrainConfig", "autocast", "checked", "errors_as_messages"]
__all__ += ["join_processes", "latest_run", "pick_device", "pick_precision", "read_run", "start_wandb"]
