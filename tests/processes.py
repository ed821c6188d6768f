"""Trainings in processes of their own, to be killed; forked from one that has imported all, they start at once."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.processes", "tests.trained", "matplotlib.backends.backend_agg", "torch.distributed.fsdp"]
)
CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "shutil.rmtree"}


def start(folder: Path, *overrides, ranks: int = 1, resume: bool = False, **how) -> list:
    """Begin a training in `ranks` processes. how: arguments of _train."""
    return start_all([(folder, overrides, resume)], ranks, **how)


def start_all(trainings: list[tuple[Path, tuple, bool]], ranks: int, **how) -> list:
    """Begin trainings, one after the other in the same processes: folder, overrides, whether it is resumed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        CONTEXT.Process(target=_train, args=(trainings, rank, ranks, port), kwargs=how) for rank in range(ranks)
    ]
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


def _train(trainings, rank, world_size, port, kill_at=None, kill_before=None, stop_in=()) -> None:
    """kill_at: SIGKILL just before the so-and-so-manieth change of a file of the (first) run folder, from 0.

    kill_before: a rank, and the part of a path before whose first change it gets SIGKILL.
    stop_in: steps, from 0, during which the last process gets SIGTERM; "evaluation": during the first one.
    """
    faulthandler.enable()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed as dist

    from runs import Ranks
    from tests.trained import run

    changes, folder = 0, trainings[0][0]
    victim, part = kill_before or (None, None)

    def watch(event: str, arguments: tuple) -> None:
        nonlocal changes
        writes = event == "open" and arguments[1] is not None and set(arguments[1]) & set("wax+")
        if (event in CHANGES or writes) and str(arguments[0]).startswith(str(folder)):
            if changes == kill_at or (rank == victim and part in " -> ".join(map(str, arguments[:2]))):
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1

    if kill_at is not None or kill_before:
        sys.addaudithook(watch)
    if rank == world_size - 1:
        _signalled(stop_in)
    if world_size > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    for place, overrides, resume in trainings:
        run(place, *overrides, resume=resume, ranks=Ranks(rank, world_size, rank))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _signalled(stop_in: tuple) -> None:
    import train

    def draw_batch(tokens, length, batch_size, seed, step, *ranks):
        if step in stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return real[0](tokens, length, batch_size, seed, step, *ranks)

    def new_losses(plan):
        if "evaluation" in stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return real[1](plan)

    real = train.draw_batch, train.new_losses
    train.draw_batch, train.new_losses = draw_batch, new_losses
