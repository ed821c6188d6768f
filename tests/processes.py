"""Trainings in processes of their own, to be killed; forked from one that has imported all, they start at once."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.processes", "tests.trained", "torch.distributed.fsdp"])
CHANGES = {"os.rename", "os.remove", "os.mkdir"}


def start(folder: Path, *overrides, ranks: int = 1, resume: bool = False, **how) -> list:
    """Begin a training in `ranks` processes. how: kill_at or stop_in of _train."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [(folder, overrides, resume, rank, ranks, port) for rank in range(ranks)]
    processes = [CONTEXT.Process(target=_train, args=of_rank, kwargs=how) for of_rank in arguments]
    for process in processes:
        process.start()
    return processes


def end(processes: list, within: float = 120) -> list[int]:
    """Wait for them; their exit codes. A process that hangs is killed, and AssertionError raised."""
    for process in processes:
        process.join(within)
    hanging = [process.kill() for process in processes if process.is_alive()]
    assert not hanging, "a process hung"
    return [process.exitcode for process in processes]


def _train(folder, overrides, resume, rank, world_size, port, kill_at=None, stop_in=()) -> None:
    """kill_at: SIGKILL just before the so-and-so-manieth change of a file of the run folder, from 0.

    stop_in: steps, from 0, during which the last process gets SIGTERM.
    """
    faulthandler.enable()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed as dist

    import train
    from runs.processes import Ranks
    from tests.trained import run

    changes = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal changes
        writes = event == "open" and arguments[1] is not None and set(arguments[1]) & set("wax+")
        if (event in CHANGES or writes) and str(arguments[0]).startswith(str(folder)):
            if changes == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1

    def draw_batch(tokens, length, batch_size, seed, step, *ranks, real=train.draw_batch):
        if step in stop_in and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(tokens, length, batch_size, seed, step, *ranks)

    if kill_at is not None:
        sys.addaudithook(watch)
    train.draw_batch = draw_batch
    if world_size > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    run(folder, *overrides, resume=resume, ranks=Ranks(rank, world_size, rank))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
