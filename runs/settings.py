"""Settings: what there is, of what type, and how a wrong one is said."""

import contextlib
import difflib
import io
import itertools
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra.errors import CompactHydraException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data import DataConfig, refuse_url
from model.safety import CONTROL, check_folder, printable, read_yaml_text
from runs.folder import run_dir
from runs.processes import all_meet, is_lost, leave_lost

log = logging.getLogger("ropewalk")

CONFIGS = Path(__file__).parents[1] / "configs"


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
    flex_attention: bool = False
    tf32: bool = True
    peak_flops: float | None = None
    eval_every: int = MISSING
    checkpoint_every: int = MISSING
    log_every: int = MISSING
    keep: int = 2
    skip_bad_steps: int = 0


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
    trust: bool = False
    repeat: str | None = None
    deterministic: bool = False
    sharding: str = "none"
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


RESOLVERS = {  # the functions that the YAML files call by name; the only ones
    "machine": machine,
    "choices": lambda group: ", ".join(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))),
    "by_preset": lambda cpu, gpu, *, _root_: {"cpu": cpu, "gpu": gpu}[_root_.get("preset") or machine()],
    "run_dir": run_dir,
    "run_subdir": lambda *run: os.path.relpath(run_dir(*run), "outputs"),
}
for _name, _resolver in RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _resolver, replace=True)


def checked(config: DictConfig, schema: type) -> DictConfig:
    """The composed configuration against its schema. ValueError for keys that are not known and types that do not fit.

    Hydra checks all but what is added with a plus sign, and what is read from a run folder.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True)
        for key, value in _texts(plain):
            if CONTROL.search(key + value):
                raise ValueError(f"{key}={value}".encode("unicode_escape").decode() + ": has a control character")
        return OmegaConf.merge(OmegaConf.structured(schema), plain)
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0] + f" (setting {error.full_key})") from error


def require(config: DictConfig, least: dict[str, float]) -> None:
    """Raise ValueError unless every named number is given or null, at least as large as stated, and below 2^63."""
    for key, low in least.items():
        value = OmegaConf.select(config, key)
        if value is not None and not low <= value < 2**63:
            raise ValueError(f"{key}={value}: must be at least {low}, and below 2^63")


def read_run(run: Path) -> tuple[DictConfig, dict]:
    """A run's config.yaml, checked against its schema, and its provenance. ValueErrors name the file."""
    path = run / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{run}: not a run folder (it has no config.yaml)")
    check_folder(run)
    try:
        plain = OmegaConf.to_container(OmegaConf.create(read_yaml_text(path)), resolve=False)
        origin = plain.pop("provenance")
        # Ours are resolved, so an interpolation is somebody else's, and is not followed.
        if "${" in json.dumps(plain):
            raise ValueError("it holds interpolations")
        config = checked(OmegaConf.create(plain), TrainConfig)
        if missing := OmegaConf.missing_keys(config):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        if not isinstance(origin.get("resumed", []), list):
            raise ValueError("its provenance.resumed is no list")
        return config, {"fingerprint": origin["fingerprint"], "wandb_id": origin["wandb_id"], **origin}
    except Exception as error:  # whatever a damaged file happens to trigger
        raise ValueError(f"{path}: not a configuration written by train.py ({error!r})") from error


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """ValueErrors about settings also say which file these are from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@contextlib.contextmanager
def clear_errors(folder: Path | None = None) -> Iterator[None]:
    """Show errors that a user can mend as one message; keep every traceback in the run's log.

    ValueErrors and OSErrors carry a message written for the user, and memory has an end. Anything else is a fault of
    the program, and is shown with its traceback. An error that not all processes of a job meet ends this one at once,
    so that the others, who may be waiting for it, learn of it.
    """
    stage = f"job {next(_jobs)}"
    try:
        yield
    except Exception as error:
        log.debug("failed", exc_info=True)
        if is_lost(error):
            leave_lost(stage, error)
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        mendable = memory or isinstance(error, ValueError | OSError)
        way_out = "; use a smaller model, train.batch_size or tokens, or shorter lengths" if memory else ""
        where = f"\n(traceback in {folder / 'train.log'})" if folder and _rank() == "0" else ""
        if not all_meet(str(error), stage):
            text = f"{printable(error)}{way_out}" if mendable else traceback.format_exc()
            print(f"error in process {_rank()}: {text}{where}", file=sys.__stderr__, flush=True)
            raise SystemExit(1) from None
        if not mendable:
            raise
        raise CompactHydraException(f"error: {printable(error)}{way_out}{where}") from error


_jobs = itertools.count()  # of this process: the processes of a job count alike


def _rank() -> str:
    return os.environ.get("RANK", "0")


@contextlib.contextmanager
def entry(schema: type) -> Iterator[None]:
    """Around a command: where Hydra ends it with an error, say what a misspelt setting may have meant.

    What Hydra says in the other processes of a job is kept back, and shown only where the first does not say it too.
    """
    logging.raiseExceptions = False  # a full disk is told once, not at every line of the log
    # Launchers that start processes of their own, such as submitit's, find the modules of this checkout.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(CONFIGS.parent), os.environ.get("PYTHONPATH"))))
    for key, _, value in (word.lstrip("+").partition("=") for word in sys.argv[1:]):
        if key in ("data.path", "data.cache"):
            try:
                refuse_url(key, value)  # before Hydra repeats it, in multirun.yaml and where a job fails
            except ValueError as error:
                sys.exit(f"error: {error}")
    held = io.StringIO()
    try:
        with contextlib.nullcontext() if _rank() == "0" else contextlib.redirect_stderr(held), _one_message():
            yield
    except SystemExit as end:
        # Hydra leaves after the error that it reports; others who leave with a status have said all there is.
        if end.code and not end.__suppress_context__:
            error = end.__context__
            if not all_meet(str(getattr(error, "__cause__", None) or error), "end") or _rank() == "0":
                print(held.getvalue(), end="", file=sys.stderr)
                for line in meant(sys.argv[1:], schema):
                    print(line, file=sys.stderr)
        raise


@contextlib.contextmanager
def _one_message() -> Iterator[None]:
    """In the place of Hydra, which shows tracebacks of its own, such as for an interpolation of a missing key."""
    wanted = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # it reports nothing, and raises
    try:
        yield
    except Exception as error:
        if wanted == "1":
            raise
        of_job = any(
            frame.f_code is clear_errors.__wrapped__.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)
        )
        if of_job and not isinstance(error, CompactHydraException):
            traceback.print_exception(error)
        else:
            print(error if of_job else _message(error), file=sys.stderr)
        sys.exit(1)
    finally:
        os.environ["HYDRA_FULL_ERROR"] = wanted


def _message(error: Exception) -> str:
    """What keeps Hydra from running a command at all, and the words of it that are to blame."""
    said, cause = str(error), error.__cause__
    if isinstance(error, CompactHydraException):
        said += f"\n{cause}" if isinstance(cause, OmegaConfBaseException) else ""
    elif isinstance(error, OmegaConfBaseException):
        said = f"error: {said.splitlines()[0]} (setting {error.full_key})"
    else:  # whatever odd words happen to trigger in Hydra
        said = f"error: {said or type(error).__name__}"
        said += f" ({cause})" if isinstance(cause, OSError) else ""  # the log's file cannot be written
    words = [error.override] if isinstance(error, OverrideParseException) else sys.argv[1:]
    named = any(word.split("=")[0].lstrip("+~") in said for word in words if "=" in word or word[:1] == "~")
    return said if named else f"{said}\nin: {' '.join(words)}"


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


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts in plain settings, each with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{key}.{name}".lstrip("."))


def _flat(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        name = f"{prefix}{key}"
        yield name
        if not OmegaConf.is_missing(config, key) and isinstance(config[key], DictConfig):
            yield from _flat(config[key], f"{name}.")
