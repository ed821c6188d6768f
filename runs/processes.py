"""The processes of a run: those of a torchrun job, how they share a model, and how they end."""

import atexit
import codecs
import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
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

    def summed(self, values: np.ndarray) -> np.ndarray:
        """float64 (n,) -> their sums over the processes."""
        return self.add_up(torch.from_numpy(values.copy())).numpy()

    def in_turn(self, action: Callable[[], Any]) -> Any:
        """Each process' own result, of the first process of a machine first: what it leaves on a disk is made once."""
        result = action() if self.local_rank == 0 else None
        if self.world_size > 1:
            self.share(None)
        return result if self.local_rank == 0 else action()


def join_processes(device: str) -> Ranks:
    """Join the torchrun job this process belongs to, if any, until it ends; a sweep's later jobs find it joined."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(name in os.environ for name in names):
        return Ranks()
    ranks = Ranks(*(int(os.environ[name]) for name in names))
    if not dist.is_initialized():
        cuda = pick_device(device, ranks.local_rank).type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
        atexit.register(dist.destroy_process_group)
    if not ranks.first:
        logging.getLogger().setLevel(logging.ERROR)
    return ranks


def shard(model: GPT, device: torch.device, precision: str) -> None:
    """sharding=fsdp (Zhao et al. 2023): split a model in place. It is whole on the CPU, and equal in all processes.

    The weights of a block are gathered for its pass. An optimiser must be made afterwards. ValueError if not possible.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes over a second

    if not dist.is_initialized():
        raise ValueError("sharding=fsdp: start the run with torchrun, or use sharding=none")
    if precision == "fp16":
        raise ValueError("sharding=fsdp: not with precision=fp16; use bf16 or fp32")
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    # Autocast keeps its copies of all weights until the pass backward; of weights gathered in its dtype it makes none.
    dtype = PRECISIONS[precision]
    policy = MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard([block.attention, block.mlp], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def averaging(forward: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Around both passes of a part of the batch: the processes average their gradients after the last part only."""
    if hasattr(forward, "set_requires_gradient_sync"):  # a sharded model
        forward.set_requires_gradient_sync(last)
    wait = isinstance(forward, DistributedDataParallel) and not last
    return forward.no_sync() if wait else contextlib.nullcontext()


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def whole_state(model: GPT, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict]:
    """Weights and the optimiser's state, as they are without sharding. All processes call it."""
    weights, whole = model.state_dict(), optimizer.state_dict()
    whole["state"] = {i: {key: _whole(one) for key, one in values.items()} for i, values in whole["state"].items()}
    return {name: _whole(weight) for name, weight in weights.items()}, whole


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict, sharded: bool) -> None:
    """Give an optimiser the state of a checkpoint, equal in all processes; each keeps its part if it is sharded."""
    if sharded:
        from torch.distributed.tensor import distribute_tensor

        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for i, values in state["state"].items():
            like = parameters[i]
            moments = {key: one for key, one in values.items() if one.shape == like.shape}  # all but the count of steps
            values |= {key: distribute_tensor(one, like.device_mesh, like.placements) for key, one in moments.items()}
    optimizer.load_state_dict(state)


class Stop:
    """A context in which the first SIGINT or SIGTERM is noted, in `signum`."""

    def __init__(self) -> None:
        self.signum, self._before = 0, {}

    def __enter__(self) -> "Stop":
        with contextlib.suppress(ValueError):  # Python allows handlers in the main thread only
            self._before = {signum: signal.signal(signum, self._note) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, _: object) -> None:
        self.signum = self.signum or signum

    def asked(self, ranks: Ranks) -> int:
        """The signal that any of the processes has got, in all of them; 0 for none."""
        largest = torch.tensor(self.signum)
        if ranks.world_size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


ASCII = {"÷": "/", "±": "+/-", "×": "x", "·": "*", "–": "-", "−": "-", "≥": ">=", "…": "...", "θ": "theta"}
codecs.register_error("ropewalk", lambda error: (ASCII.get(error.object[error.start], "?"), error.start + 1))


@contextlib.contextmanager
def errors_as_messages() -> Iterator[None]:
    """Around a command: ValueErrors, OSErrors and a lack of memory are one message, a bug keeps its traceback.

    In a job of several processes this one ends at once, so that torchrun ends the others. A terminal that knows ASCII
    only gets the text in ASCII.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="ropewalk")
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        way_out = "; use a smaller model or train.batch_size, or shorter lengths" if memory else ""
        known = memory or isinstance(error, ValueError | OSError)
        message = f"error: {error}{way_out}" if known else traceback.format_exc()
        if dist.is_initialized() and dist.get_world_size() > 1:
            lost = isinstance(error, dist.DistError) or "gloo" in str(error)
            print("error: another process has ended" if lost else message, file=sys.stderr, flush=True)
            os._exit(1)
        if not known:
            raise
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            print(message, file=sys.stderr)  # Hydra shows only the first of a sweep's failures
        raise CompactHydraException(message) from error
