"""sharding=fsdp: weights, gradients and the optimiser's moments are split over the processes (Zhao et al. 2023).

PyTorch's FSDP2. Each process keeps its part of every tensor, cut along the first dimension; a block's weights are
gathered for its pass and let go after it. In a checkpoint the weights are one file, as without sharding, and
`checkpoint/step_000100.shards/` holds the moments, each process' part as safetensors, which any number of processes
can read. (PyTorch's usual format for that has a pickle in it; reading one can run code.)
"""

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model import GPT
from model.checkpoint import file_digest
from runs.devices import PRECISIONS
from runs.processes import Ranks
from speed import keep_memory

# torch.distributed.fsdp and .checkpoint take over a second to import, so functions that need them do it.

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, as large as the weights each


def check_sharding(sharding: str, device: torch.device, precision: str, compiled: bool) -> None:
    """Raise ValueError, saying what to use, for a value that is not known and for what it does not go with."""
    if sharding not in ("none", "fsdp"):
        raise ValueError(f"sharding={sharding!r}: use none or fsdp")
    if sharding == "none":
        return
    if compiled:
        raise ValueError("sharding=fsdp: not with train.compile=true, which has not been proven with it; use false")
    if precision == "fp16":
        raise ValueError("sharding=fsdp: not with precision=fp16, whose loss scale it does not know; use bf16 or fp32")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"sharding=fsdp: not on device={device.type}; use cuda or cpu, or sharding=none")


def shard(model: GPT, device: torch.device, precision: str) -> None:
    """Split a model that is whole on the CPU, equal in all processes, over them and their devices, in place.

    An optimiser must be made afterwards: the parameters are others. A process alone has all of it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Autocast keeps the copies of weights that it makes until the pass backward, so in the end those of all blocks. But
    # where a block's matrices are gathered in its dtype, it has none to make. Norms, which it leaves alone, are not.
    dtype = PRECISIONS[precision]
    policy = MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard([block.attention, block.mlp], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    if device.type == "cpu":
        keep_memory(False)  # what is gathered and freed again would fragment it until there is more of it than weights
    # Of views that are changed in place afterwards; nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def averaging(forward: nn.Module, sharded: bool, last: bool) -> contextlib.AbstractContextManager:
    """Around both passes of a part of the batch: the processes average their gradients after the last part only."""
    if sharded:
        forward.set_requires_gradient_sync(last)
    alone = isinstance(forward, DistributedDataParallel) and not last
    return forward.no_sync() if alone else contextlib.nullcontext()


def whole_weights(model: GPT) -> dict[str, Tensor]:
    """The state dict of a sharded model in the first process' memory; empty in the others. All of them call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def write_shards(run: Path, step: int, state: dict, ranks: Ranks) -> tuple[dict, dict[str, str]]:
    """Write the moments in a training state, each process its part, for the run's checkpoint of a step.

    All processes call it. Returns the state without moments, and digests of the files by their names. OSError, in all
    of them, where a file cannot be written or the processes do not share the folder.
    """
    import torch.distributed.checkpoint as dcp

    optimizer, moments = state["optimizer"], {}
    for index, values in optimizer["state"].items():
        moments |= {f"{key}.{index}": values[key] for key in MOMENTS}
    small = {i: {k: v for k, v in values.items() if k not in MOMENTS} for i, values in optimizer["state"].items()}
    folder = run / "checkpoint" / f"step_{step:06d}.shards"
    temporary, digests = folder.with_name(f".{folder.name}.tmp"), [{}] * ranks.world_size
    with ranks.together():
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    with _first_failure(OSError, f"{folder}: cannot be written"):
        dcp.save(moments, storage_writer=dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True))
    mine = {path.name: file_digest(path) for path in temporary.glob(f"shard-{ranks.rank + 1:05d}-*.safetensors")}
    dist.all_gather_object(digests, mine)
    digests = {name: digest for of_one in digests for name, digest in sorted(of_one.items())}
    with ranks.together():
        if ranks.first:
            if lost := [name for name in digests if not (temporary / name).exists()]:
                raise OSError(f"{temporary / lost[0]}: another process wrote it, and it is not here; share the folder")
            if folder.exists():  # left by a killed process, or of a checkpoint found damaged
                shutil.rmtree(folder)
            temporary.rename(folder)
    names = {f"{folder.name}/{name}": digest for name, digest in digests.items()}
    return {**state, "optimizer": {**optimizer, "state": small}, "shards": list(digests)}, names


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict, weights: Path, sharded: bool) -> None:
    """Give an optimiser the state of a checkpoint, whether that was sharded, and whether this one's parameters are.

    weights: the checkpoint's file, beside which its shards are. All processes call it. ValueError, naming what is
    damaged, if it is not whole.
    """
    saved, moments = state["optimizer"], {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        for index, values in saved["state"].items():
            parameter = parameters[index]
            if "shards" in state:
                values |= {key: torch.zeros_like(parameter) for key in MOMENTS}
                moments |= {f"{key}.{index}": values[key] for key in MOMENTS}
            elif sharded:
                values |= {key: _distributed(values[key], parameter) for key in MOMENTS}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{weights.with_suffix('.pt')}: not a training state of this model ({error!r})") from error
    if moments:
        _read_shards(weights.with_suffix(".shards"), state["shards"], moments)
    try:
        optimizer.load_state_dict(saved)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{weights.with_suffix('.pt')}: not a training state of this model ({error})") from error


def _distributed(whole: Tensor, parameter: Tensor) -> Tensor:
    """A tensor that is whole in every process, split as a sharded parameter is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements)


def _read_shards(folder: Path, names: list[str], moments: dict[str, Tensor]) -> None:
    """Fill the tensors from the files of a folder, which must be those named, and no others."""
    import torch.distributed.checkpoint as dcp

    for path in [folder / name for name in names]:
        if not path.is_file():
            raise ValueError(f"{path}: is missing, a part of the checkpoint's training state")
    if others := {path.name for path in folder.glob("*.safetensors")} - set(names):
        raise ValueError(f"{folder / min(others)}: is not of this checkpoint; remove it")
    with _first_failure(ValueError, f"{folder}: not a whole training state"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a process alone
        dcp.load(moments, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


@contextlib.contextmanager
def _first_failure(kind: type[Exception], what: str) -> Iterator[None]:
    """An error of PyTorch's distributed checkpoints, which says it of all processes with tracebacks, in one line."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        raise kind(f"{what} (process {rank}: {first})") from error
