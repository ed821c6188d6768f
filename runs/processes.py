"""The processes of a torchrun job."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from runs.devices import pick_device


@dataclass(frozen=True)
class Ranks:
    """This process among those of a torchrun job; one alone without."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """The first process' value, in all of them."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def largest(self, value: int) -> int:
        """The largest of all processes' values, in all of them."""
        if self.world_size == 1:
            return value
        values = [0] * self.world_size
        dist.all_gather_object(values, value)
        return max(values)


def torchrun() -> Ranks:
    """This process' place in a torchrun job, or alone. ValueError where only a part of it is set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = [os.environ[name] for name in names if name in os.environ]
    if len(found) == len(names):
        return Ranks(*map(int, found))
    if "WORLD_SIZE" in os.environ:
        raise ValueError(f"of {', '.join(names)} only a part is set: start with torchrun, or unset them")
    return Ranks()


def join_processes(device_name: str) -> Ranks:
    """Join the torchrun job this process belongs to, if any, until it ends; a sweep's later jobs find it joined."""
    ranks = torchrun()
    if not ranks.first:
        logging.getLogger().setLevel(logging.ERROR)
    if ranks.world_size > 1 and not dist.is_initialized():
        backend = "nccl" if pick_device(device_name, ranks.local_rank).type == "cuda" else "gloo"
        # The others wait while the first process tokenises a corpus or evaluates.
        dist.init_process_group(backend, timeout=timedelta(hours=6))
    return ranks


@contextlib.contextmanager
def all_jobs() -> Iterator[None]:
    """Around all the jobs of this process: at their end the processes part together, while the interpreter is whole.

    Parting at the interpreter's exit, or while another still talks, now and then ended in an abort.
    """
    try:
        yield
        if dist.is_initialized():
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
