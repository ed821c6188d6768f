"""Length extrapolation: the loss of trained models at, and past, the length they were trained on.

python eval.py                                                  the latest run
python eval.py outputs/a outputs/b                              several, side by side; as runs=[outputs/a,outputs/b]
python eval.py runs='outputs/*_seed?'                           all that match
python eval.py 'prompt="def "' tokens=200                       text from the latest run, as it is decoded
torchrun --nproc-per-node 2 eval.py                             the same numbers, by two processes
"""

import glob
import logging
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import runs
from data import DataConfig, Tokenizer, get_tokenizer, prepare
from measure import Measurement, Report, Scoring, Text, comparability, evaluate_lengths, measure
from measure.answers import AnswerReport, evaluate_task, log_answers, measure_task
from measure.curves import log_measurements
from measure.groups import labels_of, scaling_words, seedless
from measure.passes import token_bar
from measure.probes import PROBES
from measure.report import coverage
from measure.windows import PROTOCOLS, default_lengths, default_stride
from model import GPTConfig
from model.checkpoint import checkpoints, latest_checkpoint, load_weights, read_config, step_of
from model.checks import check_whole
from model.positions import SCHEMES, build_scheme
from runs.settings import EvalConfig, task_of, vocab_size_of

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
    tokenizer: Tokenizer | None  # None: a run of data=task
    text: Text | None = None
    scaling: dict | None = None
    label: str = ""
    key: str = ""  # equal for seeds of one model


def run_folders(config: DictConfig) -> list[Path]:
    """The folders that runs= names, patterns filled in, or the latest run."""
    if config.runs is None:
        return [runs.latest_run(Path(config.root).expanduser())]
    found = []
    for name in config.runs if OmegaConf.is_list(config.runs) else [config.runs]:
        path = Path(str(name)).expanduser()
        matching = [match for match in sorted(glob.glob(str(path))) if (Path(match) / "config.yaml").is_file()]
        found += [path] if path.exists() or not matching else map(Path, matching)
    if not found:
        raise ValueError("runs=[]: give at least one run folder, or leave it out for the latest run")
    return list({path.resolve(): path for path in found}.values())


def open_run(folder: Path, step: int | None) -> Run:
    """ValueError or FileNotFoundError for a run that is not whole, or whose checkpoint is not of its config.yaml."""
    settings, origin = runs.read_run(folder)
    of_step = {step_of(path): path for path in checkpoints(folder)}
    if step is not None and step not in of_step:
        raise FileNotFoundError(f"checkpoint={step}: {folder} has checkpoints of steps {', '.join(map(str, of_step))}")
    path = of_step.get(step) or latest_checkpoint(folder)
    plain, config, vocab_size = OmegaConf.to_container(settings), read_config(path), vocab_size_of(settings)
    described = {"vocab_size": vocab_size, "pos": plain["pos"], "scaling": plain["scaling"]}
    expected = asdict(GPTConfig.from_dict(plain["model"], **described))
    for key, value in asdict(config).items():
        if value != expected[key]:
            raise ValueError(f"{folder}: config.yaml says {key}={expected[key]}, its checkpoint {value}")
    ends_early = settings.task is not None and settings.task.stop_at is not None
    if step is None and 0 < step_of(path) < settings.train.max_steps and not ends_early:  # 0: weights from elsewhere
        log.warning("%s: step %d of %d, not trained to its end", folder, step_of(path), settings.train.max_steps)
    tokenizer = None if settings.task else get_tokenizer(**settings.tokenizer)
    return Run(folder, settings, origin, path, config, tokenizer)


def with_text(run: Run, cache: str | None, ranks: runs.Ranks) -> Run:
    """With the validation split of its data."""
    data = DataConfig(**run.settings.data)
    data = data if cache is None else replace(data, cache=cache)
    files = ranks.in_turn(lambda: prepare(data, run.tokenizer, say=log.info))
    about = {key: files.meta[key] for key in ("corpus", "val_covered", "val_covered_of_train") if key in files.meta}
    about |= {"fingerprint": files.fingerprint, "tokenizer": run.tokenizer.name}
    return replace(run, text=Text(files.val, files.val_offsets, run.tokenizer.bytes_per_token, about))


def scalings_of(config: DictConfig) -> list[dict | None]:
    """The frequency scalings to measure under; None is the one a run was trained with."""
    plain = OmegaConf.to_container(config)
    if plain["scalings"] is None:
        return [plain["scaling"]]
    if plain["scaling"] is not None or not plain["scalings"]:
        raise ValueError(f"scalings={plain['scalings']}: a list of at least one, without scaling=")
    return [{"name": one} if isinstance(one, str) else one for one in plain["scalings"]]


def plan_runs(config: DictConfig, opened: list[Run]) -> tuple[list[Run], list[str]]:
    """Every run under every scaling that makes sense for it, and why others do not."""
    planned, skipped = [], []
    for run in opened:
        model = seedless(OmegaConf.to_container(run.settings))
        if run.text:
            model = f"{run.checkpoint.stem} {run.text.about} {model}"
        for scaling in scalings_of(config):
            label = " ".join([run.settings.name, *scaling_words(scaling)])
            stretched = scaling is not None and scaling["name"] != "none"
            if config.scalings is not None and stretched and not SCHEMES[run.config.pos["name"]].rotates:
                skipped.append(f"{label}: pos={run.config.pos['name']} has no frequencies to scale")
                continue
            gpt_config = run.config if scaling is None else replace(run.config, scaling=scaling)
            if any(other.folder == run.folder and other.config == gpt_config for other in planned):
                skipped.append(f"{label}: is measured already, under another name")
                continue
            key = f"{model} {gpt_config.scaling}"
            if any((key, run.settings.seed) == (other.key, other.settings.seed) for other in planned):
                key += f" {run.folder}"  # the same training twice is no second seed
            planned.append(replace(run, config=gpt_config, scaling=scaling, label=label, key=key))
    if not planned:
        raise ValueError(f"scalings={list(config.scalings)}: none of them fits these runs ({'; '.join(skipped)})")
    return planned, skipped


def scoring_of(config: DictConfig, opened: list[Run]) -> Scoring:
    """What all of the runs are scored on. Their training lengths are measured too, where windows allow it."""
    if config.protocol not in (*PROTOCOLS, "both"):
        raise ValueError(f"protocol={config.protocol!r}: use {', '.join(PROTOCOLS)} or both")
    check_whole("stride", config.stride, optional=True)
    trained = {run.config.train_length for run in opened}
    lengths = default_lengths(min(trained)) if config.lengths is None else sorted(set(config.lengths))
    least = 1 if config.protocol == "nonoverlapping" else config.stride or 1
    lengths = sorted({*lengths, *(n for n in trained if lengths and least <= n <= max(lengths))})
    stride = config.stride or default_stride(min(trained), lengths)
    protocols = PROTOCOLS if config.protocol == "both" else (config.protocol,)
    return Scoring(tuple(lengths), protocols, stride, config.max_targets, config.documents, config.by_position)


def measure_run(
    run: Run, scoring: Scoring, config: DictConfig, device: torch.device, precision: str, bar: tqdm, ranks: Any
) -> list[Measurement]:
    """A measurement a protocol; the first also has the probes that are asked for, which the first process makes."""
    model = load_weights(run.checkpoint, device, run.scaling)
    about = {"run": run.label, "folder": str(run.folder), "checkpoint": run.checkpoint.stem, "precision": precision}
    about |= {"trained_on": run.origin["fingerprint"], "seed": run.settings.seed, "key": run.key}
    with runs.autocast(device, precision):
        found = measure(model, run.text, scoring, about, bar.update, ranks)
        for name in [name for name in PROBES if config[name] and ranks.first]:
            try:
                found[0].probes[name] = PROBES[name](model, run.text.tokens, max(scoring.lengths))
            except ValueError as error:  # a text or lengths too short for it, or attention without weights
                log.warning("note: %s of %s: %s", name, run.label, error)
    return found


def evaluate_runs(config: DictConfig, ranks: runs.Ranks = runs.Ranks()) -> list[dict]:  # noqa: B008 (it is frozen)
    """Measure every run under every scaling, write the report, print the tables and log to wandb.

    All processes of a job measure; the rest, and the results, are the first one's.
    """
    config = runs.checked(config, EvalConfig)
    device = runs.pick_device(config.device, ranks.local_rank)
    precision = runs.pick_precision(config.precision, device)
    # The first process chooses: a moment later another run may be the latest.
    folders = ranks.share(run_folders(config) if ranks.first else None)
    opened = [open_run(folder, config.checkpoint) for folder in folders]
    several = f"{config.root}/{datetime.now():%Y-%m-%d_%H-%M-%S}_comparison"
    out = Path(config.out or (folders[0] if len(folders) == 1 else several)).expanduser()
    if any(run.settings.task for run in opened):
        return evaluate_tasks(config, opened, out, device) if ranks.first else []
    opened = [with_text(run, config.cache, ranks) for run in opened]
    scoring = scoring_of(config, opened)
    planned, skipped = plan_runs(config, opened)
    check_names(config, planned, scoring)
    total = sum(scoring.cost(run.text, build_scheme(run.config)) for run in planned)
    for run in opened:
        log.info("run      %s, %s of %s", run.settings.name, run.checkpoint.stem, run.folder)
    for text in {run.text.about["fingerprint"]: run.text for run in opened}.values():
        facts = (text.about["corpus"], scoring.pieces(text)[1], coverage(text.about))
        log.info("text     %s", ", ".join(filter(None, facts)))
    log.info("lengths  %s, %s windows", ", ".join(map(str, scoring.lengths)), config.protocol)
    log.info("cost     %s tokens to pass on %s in %s", f"{total:,}", device, precision)
    if config.max_targets is None and "sliding" in scoring.protocols and 4 * scoring.stride < max(scoring.lengths):
        log.info("hint     a larger stride= than %d is cheaper, or max_targets=65536", scoring.stride)
    for reason in skipped:
        log.info("left out %s", reason)

    with token_bar(total, ranks.first) as bar, logging_redirect_tqdm([logging.getLogger()]):
        by_run = [measure_run(run, scoring, config, device, precision, bar, ranks) for run in planned]
    if not ranks.first:
        return []
    everything = [measurement for found in by_run for measurement in found]
    notes = comparability(everything)
    if config.truncated:
        everything += [cut for measurement in everything if (cut := measurement.truncated())]
    commands = [*dict.fromkeys(str(run.origin.get("command", "?")) for run in opened), shlex.join(sys.argv)]
    settings = {str(run.folder): OmegaConf.to_container(run.settings) for run in opened}
    report = Report(everything, config.reference, config.sort, notes, skipped, commands, settings)
    report.write(out, html=True)
    print(report.text())
    for note in notes:
        log.warning("note: %s", note)
    for run in opened:
        mine = [found for other, found in zip(planned, by_run, strict=True) if other.folder == run.folder]
        try:
            if len(opened) > 1 and mine:
                Report([measurement for found in mine for measurement in found]).write(run.folder)
        except OSError as error:  # somebody else's run; the comparison holds all of it
            log.warning("note: %s", error)
        with wandb_of(run, config) as wandb_run:
            for found in mine:
                log_measurements(found, report, wandb_run)
    log.info("wrote    %s", out / "report.html")
    return report.results


def wandb_of(run: Run, config: DictConfig) -> Any:
    """The wandb run that a training began, to log to."""
    mode = config.wandb.mode if run.settings.wandb.mode != "disabled" else "disabled"
    to = OmegaConf.merge(run.settings.wandb, {"mode": mode})
    return runs.start_wandb(to, run.folder, run.origin["wandb_id"], job_type="eval", name=run.settings.name)


def evaluate_tasks(config: DictConfig, opened: list[Run], out: Path, device: torch.device) -> list[dict]:
    """Runs of data=task: exact match on the test strings of each run's own task, in the precision of its training."""
    of_text = [f"runs=[{run.settings.name}]" for run in opened if not run.settings.task]
    of_text += [f"{key}={config[key]}" for key in ("lengths", "truncated", *PROBES, "sort", "reference") if config[key]]
    if of_text:
        raise ValueError(f"{of_text[0]}: not with runs of data=task, which are measured on their own task.test")
    planned, skipped = plan_runs(config, opened)
    answers = []
    for run in planned:
        wanted = run.settings.precision if config.precision == "auto" else config.precision
        precision = runs.pick_precision(wanted, device)
        about = {"run": run.label, "folder": str(run.folder), "checkpoint": run.checkpoint.stem, "key": run.key}
        about |= {"precision": precision, "seed": run.settings.seed}
        model, task = load_weights(run.checkpoint, device, run.scaling), task_of(run.settings)
        with runs.autocast(device, precision):
            answers.append(measure_task(model, task, about))
        with wandb_of(run, config) as wandb_run:
            stretched = "".join(f"_{word}" for word in scaling_words(run.scaling))
            log_answers(answers[-1].rows, f"extrapolation/{task.name}{stretched}", wandb_run.log, wandb_run)
    commands = [*dict.fromkeys(str(run.origin.get("command", "?")) for run in opened), shlex.join(sys.argv)]
    report = AnswerReport(answers, [*commands, *(f"left out {reason}" for reason in skipped)])
    report.write(out, html=True)
    print(report.text())
    log.info("wrote    %s", out / "report.html")
    return report.results


def check_names(config: DictConfig, planned: list[Run], scoring: Scoring) -> None:
    """Whether reference= and sort= name something, before hours of measuring."""
    labels = labels_of([(run.key, run.label, run.folder.name) for run in planned]).values()
    for key, names in (("reference", labels), ("sort", ["model", *map(str, scoring.lengths), "usable"])):
        if config[key] is not None and config[key] not in names:
            raise ValueError(f"{key}={config[key]!r}: use one of {', '.join(names)}")


def sample_text(config: DictConfig, ranks: runs.Ranks = runs.Ranks()) -> list[str]:  # noqa: B008 (it is frozen)
    """Continue the prompts with one run's model; a single one is shown as it is decoded. Returns the whole texts."""
    if ranks.world_size > 1:
        raise ValueError("prompt=: one process decodes a text; start it as python eval.py, without torchrun")
    config = runs.checked(config, EvalConfig)
    check_whole("seed", config.seed, 0)
    folders, scalings = run_folders(config), scalings_of(config)
    if len(folders) > 1 or len(scalings) > 1:
        raise ValueError("prompt=: continues with one run and one scaling")
    run, device = open_run(folders[0], config.checkpoint), runs.pick_device(config.device)
    if run.settings.task:
        raise ValueError(f"task=sample: {run.folder} is a run of data=task, whose strings are no text")
    precision = runs.pick_precision(config.precision, device)
    model, end = load_weights(run.checkpoint, device, scalings[0]), run.tokenizer.end_of_document
    given = [str(one) for one in (config.prompt if OmegaConf.is_list(config.prompt) else [config.prompt])]
    # Nothing to continue is a document's beginning, which in training follows another one's end.
    prompts = [torch.tensor(ids or [end], device=device) for ids in run.tokenizer.encode(given)]
    drawing = {key: config[key] for key in ("temperature", "top_k", "top_p")}
    drawing["generator"] = torch.Generator(device).manual_seed(config.seed)
    new, shown, start = [[] for _ in given], 0, time.perf_counter()
    is_whole = lambda one: len(one) == config.tokens or one[-1:] == [end]  # noqa: E731
    with runs.autocast(device, precision):
        for ids in model.stream(prompts, config.tokens, **drawing):
            for one, following in zip(new, ids.tolist(), strict=True):
                if following >= 0 and not is_whole(one):
                    one.append(following)
            if len(given) == 1:
                text = given[0] + run.tokenizer.decode(new[0])
                text = text.rstrip("\ufffd")  # the bytes of a character may come one by one
                print(text[shown:], end="", flush=True)
                shown = max(shown, len(text))
            if all(map(is_whole, new)):
                break
    count, seconds = sum(map(len, new)), time.perf_counter() - start
    texts = [prompt + run.tokenizer.decode(one) for prompt, one in zip(given, new, strict=True)]
    print("\n\n".join(texts)[shown:])
    log.info("%d tokens in %.2f s: %.0f tokens/s on %s in %s", count, seconds, count / seconds, device, precision)
    return texts


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(config: DictConfig) -> None:
    with runs.errors_as_messages():
        command = evaluate_runs if config.prompt is None else sample_text
        command(config, runs.join_processes(config.device))


if __name__ == "__main__":
    folders = [word for word in sys.argv[1:] if (Path(word) / "config.yaml").is_file()]
    if folders:  # Hydra knows settings only
        sys.argv = [word for word in sys.argv if word not in folders] + [f"runs={folders}"]
    main()
