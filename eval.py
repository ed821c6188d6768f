"""Length extrapolation: the loss of trained models at, and past, the length they were trained on.

python eval.py                                                  the latest run
python eval.py runs=[outputs/a,outputs/b]                       several, side by side
python eval.py runs='outputs/*_seed?'                           all that match
python eval.py 'prompt="def "' tokens=200                       text from the latest run, as it is decoded
torchrun --nproc-per-node 2 eval.py                             the same numbers, by two processes
"""

import glob
import itertools
import logging
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data import DataConfig, get_tokenizer, prepare
from measure import Report, Scoring, Text, comparability, evaluate_lengths, measure
from measure.answers import AnswerReport, evaluate_task, measure_task
from measure.probes import PROBES
from measure.report import coverage, labels_of, log_curve, log_measurements, scaling_words, seedless
from measure.windows import PROTOCOLS, default_lengths, default_stride
from model import GPTConfig
from model.checkpoint import checkpoints, latest_checkpoint, load_weights, read_config, step_of
from model.checks import check_whole
from model.positions import SCHEMES, build_scheme
from model.sampling import stream
from runs.devices import autocast, pick_device, pick_precision
from runs.folder import latest_run, read_run
from runs.processes import Ranks, errors_as_messages, join_processes
from runs.settings import CONFIGS, EvalConfig, checked, model_config, task_of
from runs.tracking import start_wandb

__all__ = ["evaluate_lengths", "evaluate_task"]  # also for scripts and notebooks

log = logging.getLogger("ropewalk")

ConfigStore.instance().store(name="eval_schema", node=EvalConfig)


@dataclass(frozen=True)
class Run:
    """A run folder and the checkpoint to measure, under one frequency scaling (None: the one it was trained with)."""

    folder: Path
    settings: DictConfig
    origin: dict  # where it was trained
    checkpoint: Path
    config: GPTConfig
    text: Text | None = None  # None: not read yet, or a run of data=task
    scaling: dict | None = None
    about: dict = field(default_factory=dict)  # as of measure.measure


def run_folders(config: DictConfig) -> list[Path]:
    """The folders that runs= names, patterns filled in, or the latest run."""
    if config.runs is None:
        return [latest_run(Path(config.root).expanduser())]
    found = []
    for name in config.runs if OmegaConf.is_list(config.runs) else [config.runs]:
        path = Path(str(name)).expanduser()
        matching = [] if path.exists() else sorted(glob.glob(f"{path}/config.yaml"))
        found += [Path(match).parent for match in matching] or [path]
    if not found:
        raise ValueError("runs=[]: give at least one run folder, or leave it out for the latest run")
    return list({path.resolve(): path for path in found}.values())


def open_run(folder: Path, step: int | None) -> Run:
    """ValueError or FileNotFoundError for a run that is not whole, or whose checkpoint is not of its config.yaml."""
    settings, origin = read_run(folder)
    of_step = {step_of(path): path for path in checkpoints(folder)}
    if step is not None and step not in of_step:
        raise FileNotFoundError(f"checkpoint={step}: {folder} has checkpoints of steps {', '.join(map(str, of_step))}")
    path = of_step.get(step) or latest_checkpoint(folder)
    config, expected = read_config(path), asdict(model_config(settings))
    for key, value in asdict(config).items():
        if value != expected[key]:
            raise ValueError(f"{folder}: config.yaml says {key}={expected[key]}, its checkpoint {value}")
    if step is None and 0 < step_of(path) < settings.train.max_steps and not settings.task:  # 0: from elsewhere
        log.warning("%s: step %d of %d, not trained to its end", folder, step_of(path), settings.train.max_steps)
    return Run(folder, settings, origin, path, config)


def with_text(run: Run, cache: str | None, ranks: Ranks) -> Run:
    """With the validation split of its data."""
    tokenizer, data = get_tokenizer(**run.settings.tokenizer), DataConfig(**run.settings.data)
    data = replace(data, cache=cache or data.cache)
    files = ranks.in_turn(lambda: prepare(data, tokenizer, say=log.info))
    about = {key: files.meta[key] for key in ("corpus", "val_covered", "val_covered_of_train") if key in files.meta}
    about |= {"fingerprint": files.fingerprint, "tokenizer": tokenizer.name}
    return replace(run, text=Text(files.val, files.val_offsets, tokenizer.bytes_per_token, about))


def plan_runs(config: DictConfig, opened: list[Run]) -> tuple[list[Run], list[str]]:
    """Every run under every scaling that makes sense for it, and why others do not."""
    planned, skipped, plain = [], [], OmegaConf.to_container(config)
    scalings = [plain["scaling"]] if plain["scalings"] is None else plain["scalings"]  # None: as trained
    if not scalings or (plain["scalings"] and plain["scaling"]):
        raise ValueError(f"scalings={scalings}: a list of at least one, without scaling=")
    scalings = [{"name": one} if isinstance(one, str) else one for one in scalings]
    for run, scaling in itertools.product(opened, scalings):
        label, pos = run.settings.name + scaling_words(scaling), run.config.pos["name"]
        stretched = scaling is not None and scaling["name"] != "none"
        if config.scalings is not None and stretched and not SCHEMES[pos].rotates:
            skipped.append(f"{label}: pos={pos} has no frequencies to scale")
            continue
        gpt_config = run.config if scaling is None else replace(run.config, scaling=scaling)
        # Seeds of one task end where they answer all of it, each at a step of its own.
        solved = config.checkpoint is None and run.settings.task and run.settings.task.stop_at is not None
        same = (None if solved else run.checkpoint.stem, run.text and run.text.about, gpt_config.scaling)
        key = f"{same} {seedless(OmegaConf.to_container(run.settings))}"
        about = {"run": label, "folder": str(run.folder), "checkpoint": run.checkpoint.stem, "seed": run.settings.seed}
        if any((key, about["seed"]) == (other.about["key"], other.about["seed"]) for other in planned):
            key += f" {run.folder} {label}"  # the same training twice is no second seed
        about |= {"key": key, "trained_on": run.origin["fingerprint"]}
        planned.append(replace(run, config=gpt_config, scaling=scaling, about=about))
    if not planned:
        raise ValueError(f"scalings={list(config.scalings)}: none of them fits these runs ({'; '.join(skipped)})")
    labels = labels_of([run.about for run in planned]).values()
    if config.reference is not None and config.reference not in labels:
        raise ValueError(f"reference={config.reference!r}: use one of {', '.join(labels)}")
    return planned, skipped


def scoring_of(config: DictConfig, opened: list[Run]) -> Scoring:
    """What all of the runs are scored on. Their training lengths are measured too, where windows allow it."""
    trained = {run.config.train_length for run in opened}
    lengths = default_lengths(min(trained)) if config.lengths is None else sorted(set(config.lengths))
    least = 1 if config.protocol == "nonoverlapping" else config.stride or 1
    lengths = sorted({*lengths, *(n for n in trained if lengths and least <= n <= max(lengths))})
    stride = default_stride(min(trained), lengths) if config.stride is None else config.stride
    protocols = PROTOCOLS if config.protocol == "both" else (config.protocol,)
    return Scoring(tuple(lengths), protocols, stride, config.max_windows, config.documents, config.by_position)


def evaluate_runs(config: DictConfig, ranks: Ranks = Ranks()) -> list[dict]:  # noqa: B008 (it is frozen)
    """Measure every run under every scaling, write the report, print the tables and log to wandb.

    All processes of a job measure; the rest, and the results, are the first one's.
    """
    config = checked(config, EvalConfig)
    device = pick_device(config.device, ranks.local_rank)
    precision = pick_precision(config.precision, device)
    # The first process chooses: a moment later another run may be the latest.
    folders = ranks.share(run_folders(config) if ranks.first else None)
    opened = [open_run(folder, config.checkpoint) for folder in folders]
    several = f"{config.root}/{datetime.now():%Y-%m-%d_%H-%M-%S}_comparison"
    out = Path(config.out or (folders[0] if len(folders) == 1 else several)).expanduser()
    if out.is_file():
        raise ValueError(f"out={out}: is a file; choose a folder")
    commands = [*dict.fromkeys(str(run.origin.get("command", "?")) for run in opened), shlex.join(sys.argv)]
    if any(run.settings.task for run in opened):
        return evaluate_tasks(config, opened, out, device, commands) if ranks.first else []
    opened = [with_text(run, config.cache, ranks) for run in opened]
    scoring = scoring_of(config, opened)
    planned, skipped = plan_runs(config, opened)
    total = sum(scoring.cost(run.text, build_scheme(run.config)) for run in planned)
    for run in opened:
        log.info("run      %s, %s of %s", run.settings.name, run.checkpoint.stem, run.folder)
    for text in {(run.text.about["fingerprint"], run.text.about["tokenizer"]): run.text for run in opened}.values():
        facts = (text.about["corpus"], scoring.pieces(text)[1], coverage(text.about))
        log.info("text     %s", ", ".join(filter(None, facts)))
    lengths, protocols = ", ".join(map(str, scoring.lengths)), " and ".join(scoring.protocols)
    log.info("lengths  %s, %s windows", lengths, protocols)
    log.info("cost     %s tokens to pass on %s in %s", f"{total:,}", device, precision)
    if config.max_windows is None and "sliding" in scoring.protocols and 4 * scoring.stride < max(scoring.lengths):
        log.info("hint     a larger stride= than %d is cheaper, or max_windows=256", scoring.stride)
    for reason in skipped:
        log.info("left out %s", reason)

    everything, probes = [], [name for name in PROBES if config[name] and ranks.first]
    every = 0.1 if sys.stderr.isatty() else 30  # seconds; without a terminal each update is a line
    bar = tqdm(total=total, unit="token", unit_scale=True, leave=False, disable=not ranks.first, mininterval=every)
    with bar, logging_redirect_tqdm([logging.getLogger()]):
        for run in planned:
            model, about = load_weights(run.checkpoint, device, run.scaling), run.about | {"precision": precision}
            with autocast(device, precision):
                found = measure(model, run.text, scoring, about, bar.update, ranks)
                for name in probes:
                    try:
                        found[0].probes[name] = PROBES[name](model, run.text.tokens, max(scoring.lengths))
                    except ValueError as error:  # a text or lengths too short for it, or attention without weights
                        log.warning("note: %s of %s: %s", name, run.about["run"], error)
            everything += found
    if not ranks.first:
        return []
    notes = comparability(everything)
    cuts = [one.truncated() for one in everything] if config.truncated else []
    report = Report([*everything, *filter(None, cuts)], config.reference, notes, skipped, commands)
    report.write(out, html=True)
    print(report.text())
    for note in notes:
        log.warning("note: %s", note)
    for run in opened:
        mine = [one for one in everything if one.about["folder"] == str(run.folder)]
        with wandb_of(run, config) as wandb_run:
            for _, found in itertools.groupby(mine, lambda one: one.about["key"]):  # a scaling each
                log_measurements(list(found), report, wandb_run)
    log.info("wrote    %s", out / "report.html")
    return report.results


def wandb_of(run: Run, config: DictConfig) -> Any:
    """The wandb run that a training began, to log to."""
    mode = config.wandb.mode if run.settings.wandb.mode != "disabled" else "disabled"
    to = OmegaConf.merge(run.settings.wandb, {"mode": mode})
    return start_wandb(to, run.folder, run.origin["wandb_id"], job_type="eval", name=run.settings.name)


def evaluate_tasks(
    config: DictConfig, opened: list[Run], out: Path, device: torch.device, commands: list[str]
) -> list[dict]:
    """Runs of data=task: exact match on the test strings of each run's own task, in the precision of its training."""
    defaults = OmegaConf.load(CONFIGS / "eval.yaml")
    of_text = ("lengths", "protocol", "stride", "max_windows", "documents", "truncated", *PROBES, "reference")
    given = [f"runs=[{run.settings.name}]" for run in opened if not run.settings.task]
    given += [f"{key}={config[key]}" for key in of_text if config[key] != defaults[key]]
    if given:
        raise ValueError(f"{given[0]}: not with runs of data=task, which are measured on their own task.test")
    planned, skipped = plan_runs(config, opened)
    answers = []
    for run in planned:
        wanted = run.settings.precision if config.precision == "auto" else config.precision
        precision = pick_precision(wanted, device)
        model, task = load_weights(run.checkpoint, device, run.scaling), task_of(run.settings)
        with autocast(device, precision):
            answers.append(measure_task(model, task, run.about | {"precision": precision}))
        step, right = step_of(run.checkpoint), answers[-1]["rows"][0]["exact_match"] or 0.0
        as_trained = run.scaling in (None, {"name": "none"})
        unsolved = task.stop_at is None or (as_trained and right < task.stop_at)
        if config.checkpoint is None and step < run.settings.train.max_steps and unsolved:
            log.warning("%s: step %d of %d, not trained to its end", run.folder, step, run.settings.train.max_steps)
    report = AnswerReport(answers, [*commands, *(f"left out {reason}" for reason in skipped)])
    report.write(out, html=True)
    print(report.text())
    for run, found in zip(planned, answers, strict=True):
        with wandb_of(run, config) as wandb_run:
            prefix = f"extrapolation/{run.settings.task.name}{scaling_words(run.scaling, '_')}"
            log_curve(found["rows"], prefix, wandb_run.log, wandb_run)
    log.info("wrote    %s", out / "report.html")
    return report.results


def sample_text(config: DictConfig, ranks: Ranks = Ranks()) -> list[str]:  # noqa: B008 (it is frozen)
    """Continue the prompts with one run's model; a single one is shown as it is decoded. Returns the whole texts."""
    config = checked(config, EvalConfig)
    check_whole("seed", config.seed, 0)
    check_whole("tokens", config.tokens)
    folders, scaling = run_folders(config), OmegaConf.to_container(config)["scaling"]
    if len(folders) > 1 or config.scalings is not None or ranks.world_size > 1:
        raise ValueError("prompt=: continues with one run, one scaling= and one process, without torchrun")
    run, device = open_run(folders[0], config.checkpoint), pick_device(config.device)
    if run.settings.task:
        raise ValueError(f"prompt=: {run.folder} is a run of data=task, whose strings are no text")
    precision = pick_precision(config.precision, device)
    model, tokenizer = load_weights(run.checkpoint, device, scaling), get_tokenizer(**run.settings.tokenizer)
    end = tokenizer.end_of_document
    given = [str(one) for one in (config.prompt if OmegaConf.is_list(config.prompt) else [config.prompt])]
    # Nothing to continue is a document's beginning, which in training follows another one's end.
    prompts = [torch.tensor(ids or [end], device=device) for ids in tokenizer.encode(given)]
    drawing = {key: config[key] for key in ("temperature", "top_k", "top_p")}
    drawing["generator"] = torch.Generator(device).manual_seed(config.seed)
    new, texts, shown, start = [[] for _ in given], given, 0, time.perf_counter()
    with autocast(device, precision):
        for ids in stream(model, prompts, config.tokens, **drawing):
            for one, following in zip(new, ids.tolist(), strict=True):
                if following >= 0 and end not in one and len(one) < config.tokens:
                    one.append(following)
            texts = [prompt + tokenizer.decode(one) for prompt, one in zip(given, new, strict=True)]
            if len(given) == 1:
                text = texts[0].rstrip("\ufffd")  # the bytes of a character may come one by one
                print(text[shown:], end="", flush=True)
                shown = max(shown, len(text))
            if all(end in one for one in new):
                break
    print("\n\n".join(texts)[shown:])
    count, seconds = sum(map(len, new)), time.perf_counter() - start
    log.info("%d tokens in %.2f s: %.0f tokens/s on %s in %s", count, seconds, count / seconds, device, precision)
    return texts


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(config: DictConfig) -> None:
    with errors_as_messages():
        command = evaluate_runs if config.prompt is None else sample_text
        command(config, join_processes(config.device))


if __name__ == "__main__":
    main()
