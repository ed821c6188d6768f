"""What train.py and eval.py share, and model/ must not know: settings, devices, processes, the run folder, wandb."""

import atexit
import contextlib
import difflib
import itertools
import json
import logging
import math
import netrc
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hydra.errors import CompactHydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data import DataConfig
from measure.statistics import finite
from model.checkpoint import write_text
from speed import keep_memory

log = logging.getLogger("ropewalk")

CONFIGS = Path(__file__).parent / "configs"


@dataclass
class WandbSettings:
    mode: str = "auto"
    project: str = "ropewalk"
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class TrainSettings:
    max_steps: int = MISSING
    batch_size: int = MISSING
    micro_batch_size: int | None = None
    lr: float = MISSING
    min_lr_ratio: float = MISSING
    warmup_steps: int = MISSING
    weight_decay: float = MISSING
    beta1: float = MISSING
    beta2: float = MISSING
    grad_clip: float = MISSING
    compile: Any = False
    tf32: bool = True
    peak_flops: float | None = None
    eval_every: int = MISSING
    checkpoint_every: int = MISSING
    log_every: int = MISSING


@dataclass
class ValSettings:
    multiples: list[float] = MISSING
    stride: int | None = None
    max_targets: int | None = None


@dataclass
class TokenizerSettings:
    name: str = MISSING
    vocab_size: int | None = None


@dataclass
class TrainConfig:
    """Types of train.py's settings; the files in configs/ have the values and say what they mean."""

    name: str = MISSING
    preset: str = MISSING
    seed: int = MISSING
    device: str = "auto"
    precision: str = "auto"
    resume: str | None = None
    init_from: str | None = None
    init_table: str | None = None
    profile: bool = False
    model: dict[str, Any] = MISSING  # this and the next two are checked by GPTConfig
    pos: dict[str, Any] = MISSING
    scaling: dict[str, Any] | None = None
    data: DataConfig = MISSING
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    val: ValSettings = field(default_factory=ValSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)


def machine() -> str:
    """The preset for this machine."""
    return "gpu" if torch.cuda.is_available() else "cpu"


def _run_dir(resume: str | None, name: str) -> str:
    """Where Hydra puts a run's log: the folder of the run to resume, or a new one under outputs/.

    The processes of a torchrun job other than the first get a temporary place: the first one's folder is the run's.
    """
    if not torchrun().first:
        folder = tempfile.mkdtemp(prefix="ropewalk-rank-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
    if resume and (Path(resume).expanduser() / "config.yaml").is_file():  # else the error must not make the folder
        return str(Path(resume).expanduser())
    stem = Path("outputs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name.replace(os.sep, '_')}"
    for count in itertools.count(1):
        folder = stem if count == 1 else stem.with_name(f"{stem.name}_{count}")
        try:  # made here, so that of two runs started in the same second each has its own
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            continue


RESOLVERS = {  # the functions that the YAML files call by name; the only ones
    "machine": machine,
    "choices": lambda group: ", ".join(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))),
    "by_preset": lambda cpu, gpu, *, _root_: {"cpu": cpu, "gpu": gpu}[_root_.get("preset") or machine()],
    "run_dir": _run_dir,
    "run_subdir": lambda resume, name: os.path.relpath(_run_dir(resume, name), "outputs"),
}
for _name, _resolver in RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _resolver, replace=True)


def checked(config: DictConfig, schema: type) -> DictConfig:
    """The composed configuration against its schema. ValueError for keys that are not known and types that do not fit.

    Hydra checks all but what is added with a plus sign, and what is read from a run folder.
    """
    try:
        return OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0] + f" (setting {error.full_key})") from error


def require(config: DictConfig, least: dict[str, float]) -> None:
    """Raise ValueError unless every named number is given or null, finite, and at least as large as stated."""
    for key, low in least.items():
        value = OmegaConf.select(config, key)
        if value is not None and not low <= value < math.inf:
            raise ValueError(f"{key}={value}: must be at least {low}")


@contextlib.contextmanager
def clear_errors(folder: Path | None = None) -> Iterator[None]:
    """Show errors that a user can mend as one message; keep every traceback in the run's log.

    ValueErrors and OSErrors carry a message written for the user. Anything else is a fault of the program, and is
    shown with its traceback.
    """
    try:
        yield
    except BaseException as error:
        log.debug("failed", exc_info=True)
        if not isinstance(error, (ValueError, OSError)):
            raise
        where = f"\n(traceback in {folder / 'train.log'})" if folder else ""
        raise CompactHydraException(f"error: {error}{where}") from error


@contextlib.contextmanager
def entry(schema: type) -> Iterator[None]:
    """Around a command: where Hydra ends it with an error, say what a misspelt setting may have meant."""
    # Launchers that start processes of their own, such as submitit's, find the modules of this checkout.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(CONFIGS.parent), os.environ.get("PYTHONPATH"))))
    try:
        yield
    except SystemExit as end:
        if end.code:
            for line in meant(sys.argv[1:], schema):
                print(line, file=sys.stderr)
        raise


def meant(words: list[str], schema: type) -> Iterator[str]:
    """A line for each setting of the command line, or choice of a group, that is not known but nearly is."""
    groups: dict[str, list[str]] = {}
    known = set(_flat(OmegaConf.structured(schema)))
    for path in CONFIGS.glob("*/*.yaml"):
        groups.setdefault(path.parent.name, []).append(path.stem)
        known |= {f"{path.parent.name}.{key}" for key in OmegaConf.load(path)}
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if key in groups:
            near = [] if value in groups[key] else difflib.get_close_matches(value, groups[key], 1)
            near = [f"{key}={choice}" for choice in near]
        else:
            near = [] if key in known else difflib.get_close_matches(key, [*known, *groups], 1, cutoff=0.75)
        yield from (f"{word}: did you mean {name}?" for name in near)


def _flat(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        name = f"{prefix}{key}"
        yield name
        if not OmegaConf.is_missing(config, key) and isinstance(config[key], DictConfig):
            yield from _flat(config[key], f"{name}.")


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` or a device by name; under torchrun each process takes the CUDA device of its local rank.

    Sets up the process for it: CUDA's current device, or how a CPU's memory is handled.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if not re.fullmatch(r"cuda(:\d\d?)?|mps|cpu", name):
        raise ValueError(f"device={name!r}: use auto, cuda, cuda:<number>, mps or cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name}: this torch finds no CUDA device; use device=auto or device=cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device={name}: this torch finds no Apple GPU; use device=auto or device=cpu")
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device=cuda:{index}: this machine has {torch.cuda.device_count()} CUDA devices")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type == "cpu":
        keep_memory()
    return device


PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_precision(name: str, device: torch.device) -> str:
    """`auto` or one of PRECISIONS. auto: bf16 where the hardware multiplies it, fp16 on older GPUs, else fp32."""
    if name not in ("auto", *PRECISIONS):
        raise ValueError(f"precision={name!r}: use auto, {', '.join(PRECISIONS)}")
    if name == "fp16" and device.type != "cuda":
        raise ValueError(f"precision=fp16 on {device.type}: only on CUDA; use bf16 or fp32")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    if device.type == "cpu":
        probes = (getattr(torch.cpu, f"_is_{unit}_supported", bool) for unit in ("avx512_bf16", "amx_tile"))
        return "bf16" if any(probe() for probe in probes) else "fp32"
    return "fp32"


def autocast(device: torch.device, precision: str) -> torch.autocast:
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


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


def read_run(run: Path) -> tuple[DictConfig, dict]:
    """A run's config.yaml, checked against its schema, and its provenance. ValueErrors name the file."""
    path = run / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{run}: not a run folder (it has no config.yaml)")
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        origin = plain.pop("provenance")
        # Ours are resolved, so an interpolation is somebody else's, and is not followed.
        if "${" in json.dumps(plain):
            raise ValueError("it holds interpolations")
        config = checked(OmegaConf.create(plain), TrainConfig)
        if missing := OmegaConf.missing_keys(config):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return config, {"fingerprint": origin["fingerprint"], "wandb_id": origin["wandb_id"], **origin}
    except Exception as error:  # whatever a damaged file happens to trigger
        raise ValueError(f"{path}: not a configuration written by train.py ({error!r})") from error


def latest_run(root: Path) -> Path:
    """The run under `root` whose checkpoint is the newest. FileNotFoundError where there is none."""
    found = [path for path in root.glob("[!.]*/checkpoint/*.safetensors") if (path.parents[1] / "config.yaml").exists()]
    if not found:
        raise FileNotFoundError(f"no run with a checkpoint under {root}/; train one first, or give runs=[<folder>]")
    return max(found, key=lambda path: path.stat().st_mtime_ns).parents[1]


def provenance() -> dict:
    """Where a number came from, as far as the program can know."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    return {"command": shlex.join(sys.argv), **versions, "machine": f"{platform.system()} {platform.machine()}"}


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with its step, whatever wandb does."""

    def __init__(self, path: Path, keep: Callable[[dict], bool]):
        """Rows that a resumed run makes again, those it does not `keep`, are dropped."""
        self.path, rows = path, []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a killed run may be half a line
                continue
            if keep(row):
                rows.append(line + "\n")
        write_text(path, "".join(rows))

    def write(self, row: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")


def _logged_in() -> bool:
    """Whether wandb would find credentials without asking for them."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    for path in (os.environ["NETRC"],) if os.environ.get("NETRC") else ("~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
    return False


@dataclass
class WandbRun:
    """A wandb run, or nothing at all where wandb.mode=disabled. A failing wandb never stops the work."""

    run: Any = None

    def log(self, row: dict) -> None:
        """Log what is there: None is left out, as wandb would show it as a value."""
        self._call(lambda: self.run.log({key: value for key, value in finite(row).items() if value is not None}))

    def summary(self, values: dict) -> None:
        self._call(lambda: self.run.summary.update(values))

    def table(self, name: str, columns: list[str], rows: list[list]) -> None:
        """A table of its own panel; nothing for no rows."""
        if self.run is not None and rows:
            import wandb

            self._call(lambda: self.run.log({name: wandb.Table(columns=columns, data=rows)}))

    def finish(self, failed: bool) -> None:
        self._call(lambda: self.run.finish(exit_code=1 if failed else 0))

    def _call(self, action: Callable[[], None]) -> None:
        if self.run is None:
            return
        try:
            action()
        except Exception as error:
            self.run = None
            log.warning("wandb failed and is left out from here on: %s (metrics.jsonl goes on)", error)


def wandb_mode(mode: str) -> str:
    """online, offline or disabled. auto: what WANDB_MODE says, else online when logged in, else offline. Never asks.

    Raises ValueError for a mode that is not known, and for `online` without a login.
    """
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
    if mode not in ("online", "offline", "disabled"):
        raise ValueError(f"wandb.mode (or WANDB_MODE)={mode!r}: use auto, online, offline or disabled")
    if mode == "online" and not _logged_in():
        raise ValueError("wandb.mode=online: not logged in; run `wandb login`, or use wandb.mode=offline")
    return mode


def new_wandb_id() -> str:
    """An id for a new wandb run; in a wandb sweep its agent has given one."""
    if os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"):
        return os.environ["WANDB_RUN_ID"]
    return uuid.uuid4().hex[:8]


def wandb_identity(config: DictConfig) -> dict:
    """How a run is found among others: runs of one scheme are a group, its seeds the runs in it."""
    pos = config.pos.name + ("_linear" if config.model.get("attention") == "linear" else "")
    scaled = config.scaling is not None and config.scaling.name != "none"
    group = config.wandb.group or (f"{pos}_{config.scaling.name}" if scaled else pos)
    tags = [f"pos={pos}", f"layers={config.model.n_layer}", f"train_length={config.model.train_length}"]
    return {"name": config.name, "group": group, "job_type": "train", "tags": [*tags, *config.wandb.tags]}


def start_wandb(settings: DictConfig, run_folder: Path, run_id: str | None, **init: Any) -> WandbRun:
    """Start or take up (by its id) a wandb run whose files lie in `wandb/` beside the run folder. Without id: none."""
    mode = wandb_mode(settings.mode)
    if mode == "disabled" or run_id is None:
        return WandbRun()
    import wandb

    folder = run_folder.resolve().parent
    init |= {"project": settings.project, "dir": str(folder), "id": run_id}
    init["settings"] = wandb.Settings(silent=True, console="off", init_timeout=60)
    for attempt in dict.fromkeys((mode, "offline")):
        try:
            run = wandb.init(mode=attempt, resume="allow" if attempt == "online" else None, **init)
            break
        except Exception as error:
            log.warning("wandb could not start %s: %s (metrics.jsonl goes on)", attempt, error)
    else:
        return WandbRun()
    run.define_metric("tokens")
    for prefix in ("train", "val", "speed"):
        run.define_metric(f"{prefix}/*", step_metric="tokens")
    for prefix, x in (("extrapolation", "length"), ("by_position", "position"), ("recall", "distance")):
        run.define_metric(f"{prefix}/{x}")
        run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/{x}")
    where = run.url if attempt == "online" else f"offline in {folder / 'wandb'}"
    log.info("wandb    %s, run %s", where, run.id)
    return WandbRun(run)
