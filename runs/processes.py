"""The processes of a run: those of a torchrun job, how they share a model, and how they end."""

import atexit
import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model import GPT
from runs.devices import PRECISIONS, pick_device

PATIENCE = timedelta(hours=6)  # while the first process tokenises a corpus; torchrun ends a job of which one has died


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
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, device=torch.device("cpu"))
        return values[0]

    def add_up(self, tensor: Tensor) -> Tensor:
        """A tensor, which becomes its sum over the processes."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def in_turn(self, action: Callable[[], Any]) -> Any:
        """Each process' own result, of the first process of a machine first: what it leaves on a disk is made once."""
        result = action() if self.local_rank == 0 else None
        self.add_up(torch.zeros(1))  # waits for all
        return result if self.local_rank == 0 else action()


def join_processes(device: str) -> Ranks:
    """Join the torchrun job this process belongs to, if any, until it ends; a sweep's later jobs find it joined."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(name in os.environ for name in names):
        return Ranks()
    ranks = Ranks(*(int(os.environ[name]) for name in names))
    if not dist.is_initialized():
        # torch._dynamo imports this module, whose default arguments hold the process group. Imported before there is
        # one, it holds none; imported later, it would keep the group and its threads.
        from torch.distributed.nn import functional  # noqa: F401

        cuda = pick_device(device, ranks.local_rank).type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
        atexit.register(dist.destroy_process_group)
    if not ranks.first:
        logging.getLogger().setLevel(logging.ERROR)
    return ranks


def shard(model: GPT, device: torch.device, precision: str) -> None:
    """sharding=fsdp (Zhao et al. 2023): split a model, equal in all processes, in place; then make its optimiser."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes over a second

    if not dist.is_initialized() or precision == "fp16":
        raise ValueError("sharding=fsdp: start the run with torchrun, in bf16 or fp32; or use sharding=none")
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    # Autocast keeps its copies of all weights until the pass backward; of weights gathered in its dtype it makes none.
    dtype = PRECISIONS[precision]
    policy = MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False)
    # DTensor's caches keep the process group. Before Python ends, its threads get the time to put down their tensors.
    atexit.register(time.sleep, 0.1)
    for block in model.blocks:
        fully_shard([block.attention, block.mlp], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def averaging(forward: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Around both passes of a part of the batch: the processes average their gradients after the last part only."""
    if hasattr(forward, "set_requires_gradient_sync"):  # a sharded model
        forward.set_requires_gradient_sync(last)
    wait = isinstance(forward, DistributedDataParallel) and not last
    return forward.no_sync() if wait else contextlib.nullcontext()


def whole(value: Any) -> Any:
    """A state dict with its sharded tensors gathered, on the first process' CPU. All processes call it."""
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    if not hasattr(value, "full_tensor"):
        return value
    gathered = value.full_tensor()
    return gathered.cpu() if dist.get_rank() == 0 else None  # one whole copy on a machine, not one per process


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict, sharded: bool) -> None:
    """Give an optimiser the state of a checkpoint; of the moments of sharded weights each process keeps its part."""
    if sharded:
        from torch.distributed.tensor import distribute_tensor

        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for i, values in state["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                values[key] = distribute_tensor(values[key], weights[i].device_mesh, weights[i].placements)
    optimizer.load_state_dict(state)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM do not end this process meanwhile: each is added to the list."""
    noted: list[int] = []
    before = {of: signal.signal(of, lambda signum, _: noted.append(signum)) for of in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def errors_as_messages() -> Iterator[None]:
    """Around a command: a ValueError, an OSError or a lack of memory is one message, a bug keeps its traceback.

    In a torchrun job this process ends at once, so that torchrun ends the others.
    """
    sys.stdout.reconfigure(errors="replace")  # a terminal may know ASCII only
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        known = memory or isinstance(error, ValueError | OSError)
        way_out = "; use a smaller model or train.batch_size, or shorter lengths" if memory else ""
        message = f"error: {error}{way_out}" if known else traceback.format_exc()
        in_job = dist.is_initialized() and dist.get_world_size() > 1
        if in_job or HydraConfig.get().mode == RunMode.MULTIRUN:  # of a sweep's failures Hydra shows only the first
            print(message, file=sys.stderr, flush=True)
        if in_job:
            os._exit(1)
        if known:
            raise CompactHydraException(message) from error
        raise
