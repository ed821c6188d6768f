"""The processes of a torchrun job: what they tell each other, and how they end together."""

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from runs.devices import pick_device

PATIENCE = timedelta(hours=6)  # while the first process tokenises a corpus or writes a report
SILENCE = timedelta(minutes=10)  # between processes that compute about the same
AGREEMENT = timedelta(seconds=15)  # between processes that meet the same error

LOST = "another process of this job has died or stopped talking; its own message, or torchrun's report, says why"


class JobError(ValueError):
    """An error that all processes of a job raise, whichever of them met it."""


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
        return self._exchange(value if self.first else None)[0] if self.world_size > 1 else value

    def summed(self, values: np.ndarray) -> np.ndarray:
        """float64 (n,) -> their sums over the processes."""
        if self.world_size == 1:
            return values
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total)
        return total.numpy()

    def largest(self, value: int) -> int:
        """The largest of all processes' values, in all of them."""
        if self.world_size == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what may fail in one process only: all raise its ValueError or OSError, so that none waits for it."""
        try:
            yield
        except JobError:
            raise  # all do
        except (ValueError, OSError) as error:
            if self.world_size > 1:
                self._exchange(error=str(error))
            raise
        if self.world_size > 1:
            self._exchange()

    def in_turn(self, action: Callable[[], Any]) -> Any:
        """Each process' own result: first in the first process, then in the first of each machine, then in the others.

        So what the action leaves on a disk, shared or a machine's own, is made there once.
        """
        mine = 0 if self.first else 1 if self.local_rank == 0 else 2
        for turn in range(3 if self.world_size > 1 else 1):
            with self.together():
                if turn == mine:
                    result = action()
        return result

    def _exchange(self, value: Any = None, error: str | None = None) -> list:
        """All values, by rank. JobError if a process came with an error instead, whatever the others came for."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, (value, error), group=_patient())
        for rank, (_, text) in enumerate(found):
            if text is not None:
                raise JobError(text if rank == 0 else f"process {rank}: {text}")
        return [value for value, _ in found]


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
        cuda = pick_device(device_name, ranks.local_rank).type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=SILENCE)
        _patient()
    return ranks


@cache
def _patient() -> dist.ProcessGroup:
    """All processes once more, for waits that may take hours. One that dies ends them at once all the same."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


@contextlib.contextmanager
def all_jobs() -> Iterator[None]:
    """Around all the jobs of this process: at their end the processes part together, while the interpreter is whole.

    Parting at the interpreter's exit, or while another still talks, now and then ended in an abort.
    """
    together = True
    try:
        yield
        if dist.is_initialized():
            dist.barrier(_patient())
    except SystemExit as end:
        together = end.code != 1  # the status after an error of this process only
        raise
    except RuntimeError as error:
        if not is_lost(error):
            raise
        together = False
        leave_lost("end", error)
    finally:
        # NCCL's part waits for those of the machine's other processes, who may be waiting for this one.
        if dist.is_initialized() and (together or "nccl" not in dist.get_backend_config()):
            _patient.cache_clear()  # what still refers to it would keep its threads
            dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Whether torch.distributed cannot reach another process. gloo's errors have no type of their own."""
    words = r"gloo/.*(connection|timed out|broken pipe)"
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search(words, str(error), re.I) is not None
    )


def leave_lost(stage: str, error: BaseException) -> NoReturn:
    """End this process where another one is lost; the first to do so says it for all. stage: as in all_meet."""
    # NCCL says why, such as a network that it cannot use; gloo only that a connection has ended.
    why = f" ({' '.join(str(error).split())})" if isinstance(error, dist.DistBackendError) else ""
    try:
        first = _board(stage).add(LOST, 1) == 1
    except (KeyError, dist.DistError):
        first = True
    if first:
        print(f"error in process {os.environ.get('RANK', 0)}: {LOST}{why}", file=sys.__stderr__, flush=True)
    raise SystemExit(1) from None


def all_meet(error: str, stage: str) -> bool:
    """Whether every process of the job meets this error, within moments; stage: a word for where they are."""
    with contextlib.suppress(ValueError):
        if (ranks := torchrun()).world_size > 1:
            try:
                board = _board(stage)
                board.set(str(ranks.rank), error)
                everyone, end = list(map(str, range(ranks.world_size))), time.monotonic() + AGREEMENT.total_seconds()
                while not board.check(everyone):  # waiting in the store itself ends in warnings
                    if time.monotonic() > end:
                        return False
                    time.sleep(0.1)
                return all(board.get(rank).decode() == error for rank in everyone)
            except (KeyError, dist.DistError):
                return False
    return True


def _board(stage: str) -> dist.Store:
    """The store that torchrun keeps for its processes, and that outlives each of them."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=AGREEMENT)
    return dist.PrefixStore(f"ropewalk/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{stage}", store)
