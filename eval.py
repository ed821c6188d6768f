"""Length extrapolation: the loss of trained models at, and past, the length they were trained on.

    python eval.py                                                  the latest run
    python eval.py runs=[outputs/a,outputs/b]                       several, side by side; 'outputs/*_seed?' works too
    python eval.py protocol=both lengths=[256,512,1024]             the two ways of cutting a text into windows
    python eval.py runs=[outputs/a] scalings=[none,ntk,yarn]        every run under every frequency scaling that fits
    python eval.py recall=true shift=true attention=true            probes beside perplexity
    python eval.py task=sample prompt="def " tokens=200             text from the latest run, as it is decoded
    torchrun --nproc-per-node 2 eval.py                             the same numbers, by two processes

What is measured is kept: an interrupted command, given again, goes on where it stopped. measure/ does the measuring.
"""

import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import runs
from data import get_tokenizer
from measure import probes
from measure.protocols import PROTOCOLS, evaluate_lengths, new_losses
from measure.report import Report, comparability
from measure.results import Job, Measurement, Scoring, group_labels, seedless
from measure.store import Losses
from model.checkpoint import file_digest, load_weights
from model.positions import SCHEMES
from model.registry import lookup
from model.safety import printable
from model.sampling import continuations
from model.scaling import SCALINGS

__all__ = ["evaluate_lengths"]  # also for scripts and notebooks

log = logging.getLogger("ropewalk")

MULTIPLES = (1, 1.25, 1.5, 2, 4)


@dataclass
class WandbMode:
    mode: str = MISSING


@dataclass
class EvalConfig:
    """Types of eval.py's settings; configs/eval.yaml has the values and says what they mean."""

    task: str = MISSING
    runs: Any = MISSING
    root: str = MISSING
    checkpoint: Any = MISSING
    protocol: str = MISSING
    lengths: list[int] | None = MISSING
    stride: int | None = MISSING
    max_targets: int | None = MISSING
    documents: str | None = MISSING
    by_position: bool = MISSING
    recall: bool = MISSING
    shift: bool = MISSING
    attention: bool = MISSING
    scaling: dict[str, Any] | None = None
    scalings: list[Any] | None = MISSING
    reference: str | None = MISSING
    sort: str | None = MISSING
    fresh: bool = MISSING
    device: str = MISSING
    precision: str = MISSING
    out: str | None = MISSING
    cache: str | None = MISSING
    trust: bool = MISSING
    prompt: Any = MISSING
    tokens: int = MISSING
    temperature: float = MISSING
    top_k: int | None = MISSING
    top_p: float | None = MISSING
    seed: int = MISSING
    wandb: WandbMode = field(default_factory=WandbMode)


ConfigStore.instance().store(name="eval_schema", node=EvalConfig)


def default_lengths(train_length: int, multiples: Sequence[float] = MULTIPLES) -> list[int]:
    return sorted({max(1, round(multiple * train_length)) for multiple in multiples})


def default_stride(train_length: int, lengths: Sequence[int]) -> int:
    """Half the training length, but no more than the shortest length; 1 for no lengths, which are refused later."""
    return max(1, min(train_length // 2, min(lengths, default=1)))


def scalings_of(config: DictConfig) -> list[dict | None]:
    """The frequency scalings to measure under; None is the one a run was trained with."""
    plain = OmegaConf.to_container(config)
    if plain["scalings"] is None:
        return [plain["scaling"]]
    if plain["scaling"] is not None:
        raise ValueError("scaling= and scalings= together: give one of them")
    if not plain["scalings"]:
        raise ValueError("scalings=[]: give at least one, or leave it out to measure runs as they were trained")
    scalings = [{"name": one} if isinstance(one, str) else one for one in plain["scalings"]]
    for scaling in scalings:
        if scaling is not None:
            lookup("scalings", {"none": lambda: None, **SCALINGS}, scaling)
    return scalings


@dataclass
class ScaledRun:
    """One run under one scaling: what to pass, and the losses so far. Those of equal keys are seeds of one model."""

    run: runs.Run
    label: str
    key: str
    scaling: dict | None
    job: Job
    losses: Losses


def plan_tasks(
    config: DictConfig, loaded: list[runs.Run], scoring: Scoring, machine: dict
) -> tuple[list[ScaledRun], list[str]]:
    """Every run under every scaling that makes sense for it, and why others do not. machine: device and precision."""
    tasks, skipped = [], []
    for run in loaded:
        weights = file_digest(run.checkpoint)
        trained = f"{run.checkpoint.stem} on {run.origin['fingerprint']}"
        model = f"{trained} {seedless(OmegaConf.to_container(run.settings))}"
        for scaling in scalings_of(config):
            label = run.name if scaling is None else " ".join([run.name, *_scaling_words(scaling)])
            stretched = scaling is not None and scaling.get("name") != "none"
            if config.scalings is not None and stretched and not SCHEMES[run.config.pos["name"]].rotates:
                skipped.append(f"{label}: pos={run.config.pos['name']} has no frequencies to scale")
                continue
            gpt_config = run.config if scaling is None else replace(run.config, scaling=scaling)
            job = Job(gpt_config, run.files, run.tokenizer, scoring)
            folder = run.files.folder.parent / "measurements"
            losses = Losses(folder, job.identity() | machine | {"weights": weights}, new_losses(job.plan), config.fresh)
            if any(task.run is run and task.job.config == gpt_config for task in tasks):
                skipped.append(f"{label}: is measured already, under another name")
                continue
            key = f"{model} {gpt_config.scaling}"
            if any((key, run.settings.seed) == (task.key, task.run.settings.seed) for task in tasks):
                key += f" {run.folder}"  # the same training twice is no second seed
            tasks.append(ScaledRun(run, label, key, scaling, job, losses))
    if not tasks:
        raise ValueError(f"scalings={list(config.scalings)}: none of them fits these runs ({'; '.join(skipped)})")
    return tasks, skipped


def _scaling_words(scaling: dict) -> list[str]:
    """Its name, and what is not as by default: [yarn, 4.0, beta_fast=8]."""
    name, known = lookup("scaling", {"none": lambda: None, **SCALINGS}, scaling)
    others = {key: value for key, value in scaling.items() if key != "name" and value != known[key]}
    return [name, *(str(value) if key == "factor" else f"{key}={value}"[:24] for key, value in others.items())]


def measure_all(tasks: list[ScaledRun], device: torch.device, precision: str, ranks: runs.Ranks) -> None:
    """Score what is not scored yet, with one bar over all of it; every few seconds, and at the end, it is saved.

    All processes of a job work on one task after the other; the first one's losses are what is known, and are saved.
    """
    with ranks.together():
        names = [task.losses.path.name for task in tasks]
        if ranks.share(names) != names:
            raise ValueError(
                "its weights, data, program, torch, device or precision are not those of the first process; "
                "numbers from both would not be one measurement"
            )
    for task in tasks:
        task.losses.values = ranks.summed(task.losses.values if ranks.first else np.zeros_like(task.losses.values))
    open_tasks = [task for task in tasks if not task.losses.complete]
    cost, left = (sum(task.job.plan.tokens for task in some) for some in (tasks, open_tasks))
    known = f"; {cost - left:,} of them known from before" if left < cost else ""
    log.info(f"cost     {cost:,} tokens to pass{known}")
    hidden = None if open_tasks and ranks.first else True  # None: where the output is no terminal
    bar = tqdm(total=left, unit="token", unit_scale=True, leave=False, disable=hidden)
    with bar, logging_redirect_tqdm([logging.getLogger()]):
        for task in open_tasks:
            bar.set_description(task.label, refresh=False)
            model = load_weights(task.run.checkpoint, device, task.scaling)

            def passed(tokens: int, losses: Losses = task.losses) -> None:
                bar.update(tokens)
                if ranks.first:
                    losses.save()

            try:
                with runs.autocast(device, precision):
                    task.job.score(model, task.losses.values, done=passed, ranks=ranks)
            finally:
                if ranks.first:
                    task.losses.save(now=True)


def measurements_of(task: ScaledRun, precision: str) -> list[Measurement]:
    run = task.run
    about = {"run": task.label, "folder": str(run.folder), "checkpoint": run.checkpoint.stem}
    about |= {"trained_on": run.origin["fingerprint"], "precision": precision}
    return task.job.measurements(task.losses.values, about, run.settings.seed, task.key)


def probe(task: ScaledRun, config: DictConfig, longest: int, device: torch.device, precision: str) -> dict:
    """What the probes that are asked for say of one model, by the probe's name."""
    wanted = [name for name in PROBES if config[name]]
    if not wanted:
        return {}
    model, tokens, found = load_weights(task.run.checkpoint, device, task.scaling), task.run.files.val, {}
    for name in wanted:
        log.info("%-8s %s", name, task.label)
        try:
            with runs.autocast(device, precision):
                found[name] = PROBES[name](model, tokens, longest)
        except ValueError as error:  # a text or lengths too short for it, or attention that has no weights
            log.warning("note: %s of %s: %s", name, task.label, error)
    return found


PROBES = {
    "recall": probes.recall,
    "shift": lambda model, tokens, longest: probes.shift(model, tokens),
    "attention": lambda model, tokens, longest: probes.attention_by_distance(
        model, tokens, min(longest, model.pos.max_length or longest)
    ),
}


def log_curve(result: dict, prefix: str, record: Callable[[dict], None], wandb_run: runs.WandbRun) -> None:
    """The curve as metrics with length as their x-axis, and a summary value a length to sort runs by."""
    rows = [row for row in result["rows"] if row["nll"] is not None]
    for row in rows:
        values = {f"{prefix}/{key}": row.get(key) for key in ("nll", "perplexity", "stderr", "bits_per_byte")}
        record({"extrapolation/length": row["length"], **values})
    wandb_run.summary({f"{prefix}/perplexity_{row['length']}": row["perplexity"] for row in rows})


def log_measurements(task: ScaledRun, found: list[Measurement], report: Report, wandb_run: runs.WandbRun) -> None:
    """Curves by length and by position, and the table of paired differences."""
    scaling = found[0].result["scaling"]
    stretched = "".join(f"_{word}" for word in _scaling_words(scaling)) if scaling else ""
    pairs = []
    for measurement in found:
        result = measurement.result
        log_curve(result, f"extrapolation/{result['protocol']}{stretched}", wandb_run.log, wandb_run)
        for row in result["rows"]:
            if pair := row.get("against_train_length"):
                about = {"protocol": result["protocol"], "length": row["length"]}
                pairs.append({**about, "reference": f"length {result['train_length']}", **pair})
    for row in found[0].result.get("recall", []):
        values = {f"recall/{key}{stretched}": row[key] for key in ("nll", "control_nll", "gain")}
        wandb_run.log({"recall/distance": row["distance"], **values})
    for row in found[0].result.get("by_position", []):
        values = {f"by_position/nll{stretched}": row["nll"], f"by_position/stderr{stretched}": row["stderr"]}
        wandb_run.log({"by_position/position": row["to"], **values})
    for row in found[0].result.get("shift", []):
        wandb_run.summary({f"shift/mean_change_{row['shift']}{stretched}": row["mean_change"]})
    pairs += [pair for pair in report.paired if pair["model"] == report.labels[task.key]]
    columns = ["protocol", "length", "reference", "difference", "low", "high", "clusters"]
    wandb_run.table(f"paired{stretched}", columns, [[pair[column] for column in columns] for pair in pairs])


def evaluate_runs(config: DictConfig, ranks: runs.Ranks = runs.Ranks()) -> list[dict]:  # noqa: B008 (it is frozen)
    """Measure every run under every scaling, print the tables, write the report and log to wandb.

    All processes of a job measure; the rest, and the results, are the first one's.
    """
    with ranks.together():
        config = runs.checked(config, EvalConfig)
        runs.require(config, {"stride": 1, "max_targets": 1})
        if config.protocol not in (*PROTOCOLS, "both"):
            raise ValueError(f"protocol={config.protocol!r}: use {', '.join(PROTOCOLS)} or both")
        mode = runs.wandb_mode(config.wandb.mode) if ranks.first else "disabled"
        device = runs.pick_device(config.device, ranks.local_rank)
        precision = runs.pick_precision(config.precision, device)
        loaded = runs.read_runs(config, ranks)
        out = _out(config, loaded) if ranks.first else None
        scoring = _scoring(config, loaded)
        tasks, skipped = plan_tasks(config, loaded, scoring, {"device": device.type, "precision": precision})
        _check_columns(config, tasks)
    for run in loaded:
        log.info("run      %s, %s of %s", run.name, run.checkpoint.stem, run.folder)
    for task in {task.run.files.folder: task for task in tasks}.values():
        log.info("text     %s, %s", task.run.files.meta["corpus"], task.job.documents)
    lengths = ", ".join(map(str, scoring.lengths))
    log.info("lengths  %s, %s windows, on %s in %s", lengths, config.protocol, device, precision)
    for reason in skipped:
        log.info("left out %s", reason)

    measure_all(tasks, device, precision, ranks)
    if not ranks.first:
        return []
    by_task = [measurements_of(task, precision) for task in tasks]
    for task, (first, *_) in zip(tasks, by_task, strict=True):
        first.result.update(probe(task, config, max(scoring.lengths), device, precision))
    everything = [measurement for of_task in by_task for measurement in of_task]
    notes = comparability([m.result for m in everything])
    commands = [
        *dict.fromkeys(str(run.origin.get("command", "?")) for run in loaded),
        shlex.join(runs.redacted(sys.argv)),
    ]
    settings = {run.name: OmegaConf.to_container(run.settings) for run in loaded}
    report = Report(everything, config.reference, config.sort, notes, skipped, commands, settings)
    print(report.text())
    for note in notes:
        log.warning("note: %s", note)
    report.write(out)
    for run in loaded:
        mine = [(task, of_task) for task, of_task in zip(tasks, by_task, strict=True) if task.run is run]
        if len(loaded) > 1 and mine:
            try:
                Report([m for _, of_task in mine for m in of_task]).write(run.folder, html=False)
            except OSError as error:  # somebody else's run; the comparison holds it all
                log.warning("note: nothing is written into %s: %s", run.folder, error)
        with _wandb(run, mode) as wandb_run:
            for task, of_task in mine:
                log_measurements(task, of_task, report, wandb_run)
    log.info("wrote    %s", out / "report.html")
    return report.results


def _out(config: DictConfig, loaded: list[runs.Run]) -> Path:
    if config.out:
        out = Path(config.out).expanduser()
    elif len(loaded) == 1:
        out = loaded[0].folder
    else:
        out = Path(config.root) / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_comparison"
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"out={out}: {there} is a file; give a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"out={out}: {there} cannot be written to; give another folder")
    return out


def _scoring(config: DictConfig, loaded: list[runs.Run]) -> Scoring:
    train_length = min(run.config.train_length for run in loaded)
    lengths = sorted(set(config.lengths)) if config.lengths is not None else default_lengths(train_length)
    stride = config.stride if config.stride is not None else default_stride(train_length, lengths)
    protocols = PROTOCOLS if config.protocol == "both" else (config.protocol,)
    given = {key: config[key] for key in ("max_targets", "documents", "by_position")}
    return Scoring(tuple(lengths), protocols, stride, **given)


def _check_columns(config: DictConfig, tasks: list[ScaledRun]) -> None:
    """Whether reference= and sort= name something, before hours of measuring."""
    labels = list(group_labels([(task.key, task.label) for task in tasks]).values())
    if config.reference is not None and config.reference not in labels:
        raise ValueError(f"reference={config.reference!r}: the models are {', '.join(labels)}")
    columns = ["model", *map(str, tasks[0].job.scoring.lengths)]
    if config.sort is not None and config.sort not in columns:
        raise ValueError(f"sort={config.sort!r}: the columns are {', '.join(columns)}")


def _wandb(run: runs.Run, mode: str) -> runs.WandbRun:
    """The wandb run of a run folder, taken up again."""
    settings = OmegaConf.merge(run.settings.wandb, {} if run.settings.wandb.mode == "disabled" else {"mode": mode})
    identity = runs.wandb_identity(run.settings)
    return runs.start_wandb(settings, run.folder, run.origin["wandb_id"], **identity)


def sample_text(config: DictConfig, ranks: runs.Ranks) -> list[str]:
    """Continue the prompts with one run's model; a single one is shown as it is decoded. Returns the whole texts."""
    if ranks.world_size > 1:
        raise ValueError("task=sample: one process decodes a text; start it as python eval.py, without torchrun")
    prompt = OmegaConf.to_container(config, resolve=True)["prompt"]  # text: a ${ in it is not read a second time
    config = runs.checked(OmegaConf.merge(config, {"prompt": ""}), EvalConfig)
    runs.require(config, {"tokens": 1, "seed": 0, "temperature": 0})
    device = runs.pick_device(config.device)
    precision = runs.pick_precision(config.precision, device)
    folders = runs.run_folders(config)
    if len(folders) > 1:
        raise ValueError(f"runs={config.runs}: task=sample takes one run")
    settings, _ = runs.read_run(folders[0])
    if config.scalings is not None:
        raise ValueError("scalings= and task=sample: a text has one; use scaling=")
    (scaling,) = scalings_of(config)
    tokenizer = get_tokenizer(**settings.tokenizer)
    model = load_weights(runs.chosen_checkpoint(folders[0], config.checkpoint), device, scaling)
    given = [str(one) for one in prompt] if isinstance(prompt, list) else [str(prompt)]
    # Nothing to continue is a document's beginning, which in training follows another one's end.
    ids = [encoded or [tokenizer.end_of_document] for encoded in tokenizer.encode(given)]
    prompts, new = [torch.tensor(one) for one in ids], [[] for _ in ids]
    drawing = {key: config[key] for key in ("temperature", "top_k", "top_p", "seed")}
    shown, start = len(given[0]) if len(given) == 1 else 0, time.perf_counter()
    say = printable if sys.stdout.isatty() else str  # a model may write what a terminal would obey
    if len(given) == 1:
        print(given[0], end="", flush=True)
    with runs.autocast(device, precision):
        for drawn in continuations(model, prompts, config.tokens, stop=tokenizer.end_of_document, **drawing):
            for row, token in drawn.items():
                new[row].append(token)
            if len(given) == 1:
                text = given[0] + tokenizer.decode(new[0])
                whole = len(text.rstrip("\ufffd"))  # the bytes of a character may come one by one
                print(say(text[shown:whole]), end="", flush=True)
                shown = max(shown, whole)
    count, seconds = sum(map(len, new)), time.perf_counter() - start
    texts = [prompt + tokenizer.decode(one) for prompt, one in zip(given, new, strict=True)]
    print(say(texts[0][shown:] if len(given) == 1 else "\n\n".join(texts)))
    log.info(
        "%d tokens in %.2f s: %.0f tokens/s, %s on %s in %s",
        count,
        seconds,
        count / seconds,
        settings.name,
        device,
        precision,
    )
    return texts


def hydra_string(value: str) -> str:
    """A shell's word as a string that Hydra reads back as it is: `def f(x):` is text, not one of its expressions."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped).replace("${", "\\${")
    return f'"{escaped}"'


TASKS = {"measure": evaluate_runs, "sample": sample_text}


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(config: DictConfig) -> None:
    with runs.clear_errors(), runs.Stop():
        if config.task not in TASKS:
            raise ValueError(f"task={config.task!r}: use {' or '.join(TASKS)}")
        try:
            TASKS[config.task](config, runs.join_processes(config.device))
        except KeyboardInterrupt as error:  # Stopped is one
            log.warning("interrupted; what was measured is kept, and the same command goes on from there")
            raise SystemExit(getattr(error, "status", 130)) from None


if __name__ == "__main__":
    for i, word in enumerate(sys.argv):
        if re.match("prompt=(?![\"'[])", word):
            sys.argv[i] = f"prompt={hydra_string(word.removeprefix('prompt='))}"
    with runs.entry(EvalConfig), runs.all_jobs():
        main()
