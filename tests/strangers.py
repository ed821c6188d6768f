"""A stranger's run folder, prepared for an attack."""

from pathlib import Path

import yaml

from eval import EvalConfig, sample_text
from runs import Ranks
from tests.trained import composed

SECRET = "the-canary-sings"


def rewrite(folder: Path, **changes) -> None:
    """config.yaml with other values, by dotted names with __ for the dot."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in changes.items():
        *blocks, last = key.split("__")
        block = settings
        for name in blocks:
            block = block[name]
        block[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def sample(folder, tmp):
    """A few tokens of the run's model, as the command draws them."""
    words = ["task=sample", f"runs='{folder}'", "tokens=2", "device=cpu", "wandb.mode=disabled"]
    return sample_text(composed(*words, name="eval", schema=EvalConfig), Ranks())
