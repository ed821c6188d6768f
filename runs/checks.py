"""What can be known to be wrong with settings before any work is done."""

import math

from omegaconf import DictConfig, OmegaConf

from data import get_tokenizer
from model import GPTConfig
from model.checks import check_memory
from runs.processes import Ranks
from runs.settings import require
from runs.tracking import wandb_mode


def check_settings(config: DictConfig, ranks: Ranks) -> GPTConfig:
    """Everything that can be known to be wrong before any work is done. Raises ValueError naming the setting."""
    t, v = config.train, config.val
    at_least_1 = ("max_steps", "batch_size", "micro_batch_size", "eval_every", "checkpoint_every", "log_every", "keep")
    at_least_0 = ("warmup_steps", "weight_decay", "skip_bad_steps", "min_lr_ratio", "beta1", "beta2")
    least = dict.fromkeys(at_least_1, 1) | dict.fromkeys(at_least_0, 0)
    require(config, {f"train.{key}": low for key, low in least.items()} | {"val.stride": 1, "val.max_targets": 1})
    require(config, {"seed": 0})
    wandb_mode(config.wandb.mode)
    for key in ("lr", "grad_clip"):
        if not 0 < t[key] < math.inf:
            raise ValueError(f"train.{key}={t[key]}: must be a finite number above 0")
    for key in ("beta1", "beta2"):
        if t[key] >= 1:
            raise ValueError(f"train.{key}={t[key]}: must be below 1")
    if t.peak_flops is not None and not 0 < t.peak_flops < math.inf:
        raise ValueError(f"train.peak_flops={t.peak_flops}: must be a finite number above 0, or null")
    if config.profile and t.max_steps < 5:
        raise ValueError(f"profile=true records steps 3 to 5, train.max_steps={t.max_steps}: must be at least 5")
    if t.compile not in (True, False):
        raise ValueError(f"train.compile={t.compile!r}: use true or false")
    if not v.multiples or not all(0 < multiple < math.inf for multiple in v.multiples):
        raise ValueError(f"val.multiples={list(v.multiples)}: at least one, all finite and above 0")
    if t.batch_size % (ranks.world_size * (t.micro_batch_size or 1)):
        raise ValueError(
            f"train.batch_size={t.batch_size}: must be a multiple of train.micro_batch_size={t.micro_batch_size} "
            f"times the number of processes, {ranks.world_size}"
        )
    if config.init_table not in (None, "interpolate"):
        raise ValueError(f"init_table={config.init_table!r}: use interpolate, or null to refuse")
    plain, vocab_size = OmegaConf.to_container(config), get_tokenizer(**config.tokenizer).vocab_size
    found = GPTConfig.from_dict(plain["model"], vocab_size=vocab_size, pos=plain["pos"], scaling=plain["scaling"])
    ids = 8 * (t.batch_size // ranks.world_size) * (found.train_length + 1)
    check_memory(ids, f"train.batch_size={t.batch_size}: the batch's token ids", "use a smaller one")
    return found
