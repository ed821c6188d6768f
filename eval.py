"""Length extrapolation: the loss of a trained model at, and past, the length it was trained on.

    python eval.py                                    the latest run
    python eval.py runs=[outputs/a,outputs/b]         several, side by side
    python eval.py protocol=nonoverlapping lengths=[256,512]

Two protocols, since they answer different questions (Press et al. 2021, "Train Short, Test Long", section 2.2): longer
windows of `nonoverlapping` also have fewer tokens with little context; under `sliding` only the context differs.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

import runs
from data import DataConfig, TokenFiles, Tokenizer, get_tokenizer, prepare
from model import GPT
from model.checkpoint import latest_checkpoint, load_weights, write_file

log = logging.getLogger("ropewalk")

PROTOCOLS = ("sliding", "nonoverlapping")
MULTIPLES = (1, 1.25, 1.5, 2, 4)


@dataclass
class WandbMode:
    mode: str = "auto"


@dataclass
class EvalConfig:
    """Types of eval.py's settings; configs/eval.yaml has the values and says what they mean."""

    runs: Any = None
    root: str = "outputs"
    protocol: str = "sliding"
    lengths: list[int] | None = None
    stride: int | None = None
    max_targets: int | None = None
    device: str = "auto"
    precision: str = "auto"
    out: str | None = None
    scaling: dict[str, Any] | None = None
    wandb: WandbMode = field(default_factory=WandbMode)


ConfigStore.instance().store(name="eval_schema", node=EvalConfig)


def window_spans(
    n_tokens: int, lengths: Sequence[int], length: int, protocol: str, stride: int, max_targets: int | None = None
) -> np.ndarray:
    """The windows of one length, int64 (windows, 3): first input token, input tokens, how many last targets are scored.

    A window of inputs t ... t + n - 1 predicts tokens t + 1 ... t + n. nonoverlapping: windows of `length`, the last
    one what is left. sliding: the scored targets are cut into blocks of `stride`, the same for all `lengths`, from the
    first that has a full context at the longest length; each window ends with its block. max_targets keeps at
    most that many in whole windows, but at least one window, spread evenly over the whole text.
    """
    if protocol == "nonoverlapping":
        starts = np.arange(0, n_tokens - 1, length)
        sizes = np.minimum(length, n_tokens - 1 - starts)
        spans, block = np.stack((starts, sizes, sizes), axis=1), length
    else:
        first = max(lengths) - stride + 1
        blocks = np.arange(first, n_tokens, stride)
        ends = np.minimum(blocks + stride, n_tokens)
        spans = np.stack((ends - 1 - length, np.full_like(ends, length), ends - blocks), axis=1)
        block = stride
    if max_targets is not None and len(spans) > (keep := max(1, max_targets // block)):
        spans = spans[np.linspace(0, len(spans) - 1, keep).round().astype(np.int64)]
    return spans.astype(np.int64)


def evaluate_lengths(
    model: GPT,
    tokens: torch.Tensor | np.ndarray,
    lengths: Sequence[int],
    protocol: str = "sliding",
    stride: int = 64,
    max_targets: int | None = None,
    bytes_per_token: np.ndarray | None = None,
    batch_tokens: int = 16384,
    progress: bool = False,
) -> list[dict]:
    """Mean loss of a text at each context length. Runs under whatever autocast is on; dropout is off.

    tokens: integers, 1-D. stride: sliding only, targets scored a window, each with length - stride + 1 to length tokens
    of context. max_targets: score at most that many, in windows spread over the text (None: all). bytes_per_token:
    (vocab_size,), adds bits_per_byte. Batches hold about batch_tokens tokens, which changes speed and memory, not
    results. progress: a bar, where the output is a terminal.

    Returns one dict a length: length; nll, nats a token, the sum of all losses over their count; perplexity; stderr,
    the standard error of nll over windows (ratio estimator; None for a single window); scored, the tokens counted.
    Past a learned table nll, perplexity and stderr are None, scored is 0 and `note` says where the table ends.
    Raises ValueError for settings that do not fit the text or each other, and ids outside the vocabulary.
    """
    tokens = tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    _check_measurement(tokens, lengths, protocol, stride, max_targets)
    lengths = [int(length) for length in lengths]
    limit = model.pos.max_length
    fitting = [length for length in lengths if limit is None or length <= limit]
    plans = {length: window_spans(len(tokens), lengths, length, protocol, stride, max_targets) for length in fitting}
    rows, total = [], sum(int(spans[:, 1].sum()) for spans in plans.values())
    bar = tqdm(total=total, unit="token", unit_scale=True, leave=False, disable=None if progress else True)
    was_training = model.training
    model.eval()
    try:
        for length in lengths:
            rows.append({"length": length, "nll": None, "perplexity": None, "stderr": None, "scored": 0})
            if bytes_per_token is not None:
                rows[-1]["bits_per_byte"] = None
            if length not in plans:
                rows[-1]["note"] = f"table ends at {limit}"
                continue
            bar.set_description(f"length {length}", refresh=False)
            losses, counts, n_bytes = _score(model, tokens, length, plans[length], bytes_per_token, batch_tokens, bar)
            nll, stderr = ratio_and_error(losses, counts)
            rows[-1] |= {"nll": nll, "perplexity": _exp(nll), "stderr": stderr, "scored": int(counts.sum())}
            if n_bytes:
                rows[-1]["bits_per_byte"] = losses.sum() / math.log(2) / n_bytes
    finally:
        model.train(was_training)
        bar.close()
    return rows


def _check_measurement(
    tokens: np.ndarray, lengths: Sequence[int], protocol: str, stride: int, max_targets: int | None
) -> None:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens must be integers in one dimension, found {tokens.dtype} {tokens.shape}")
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol={protocol!r}: use {' or '.join(PROTOCOLS)}")
    if not len(lengths) or any(int(length) != length or length < 1 for length in lengths):
        raise ValueError(f"lengths={list(lengths)}: must be whole numbers of at least 1, and at least one of them")
    if max(lengths) > len(tokens) - 1:
        raise ValueError(
            f"lengths={list(lengths)}: a window of {max(lengths)} and its target do not fit into the {len(tokens)} "
            "tokens of the text; use shorter lengths or more text"
        )
    if protocol == "sliding" and not 1 <= stride <= min(lengths):
        raise ValueError(f"stride={stride}: must be from 1 to the shortest length, {min(lengths)}")
    if max_targets is not None and max_targets < 1:
        raise ValueError(f"max_targets={max_targets}: must be at least 1, or null for all")


@torch.inference_mode()
def _score(
    model: GPT, tokens: np.ndarray, length: int, spans: np.ndarray, bytes_per_token, batch_tokens: int, bar: tqdm
) -> tuple[np.ndarray, np.ndarray, int]:
    """Summed loss and count of every window, float64 and int64 (windows,), and the bytes of all scored tokens."""
    device = next(model.parameters()).device
    losses, n_bytes = np.empty(len(spans)), 0
    for size in np.unique(spans[:, 1]):  # the last window of a text may be shorter: a batch of its own
        same = np.flatnonzero(spans[:, 1] == size)
        per_batch = max(1, batch_tokens // int(size))
        for part in (same[i : i + per_batch] for i in range(0, len(same), per_batch)):
            batch = spans[part]
            ids = torch.from_numpy(tokens[batch[:, :1] + np.arange(size + 1)].astype(np.int64))  # (windows, size + 1)
            model.check_tokens(ids)
            targets = ids[:, 1:].clone()
            targets[torch.arange(size) < size - torch.from_numpy(batch[:, 2:])] = -100
            nll = model(ids[:, :-1].to(device), targets=targets.to(device), scaling_length=length)
            bar.update(len(batch) * int(size))
            losses[part] = nll.cpu().double().sum(dim=1).numpy()
            if bytes_per_token is not None:
                n_bytes += int(bytes_per_token[targets[targets != -100].numpy()].sum())
    return losses, spans[:, 2], n_bytes


def ratio_and_error(losses: np.ndarray, counts: np.ndarray) -> tuple[float, float | None]:
    """Σ losses / Σ counts over windows, and its standard error (Cochran 1977, equation 2.46); None for one window."""
    n, total = len(losses), counts.sum()
    ratio = losses.sum() / total
    if n < 2:
        return float(ratio), None
    residuals = losses - ratio * counts
    return float(ratio), float(math.sqrt(n / (n - 1) * (residuals**2).sum()) / total)


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


def measure_run(
    model: GPT,
    files: TokenFiles,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    precision: str,
    about: dict,
    progress: bool = False,
    **protocol: Any,
) -> dict:
    """evaluate_lengths on the validation split, with everything needed to tell later what was measured.

    about: run, folder, checkpoint and trained_on (the fingerprint of its training data). protocol: protocol, stride and
    max_targets of evaluate_lengths.
    """
    with runs.autocast(next(model.parameters()).device, precision):
        rows = evaluate_lengths(
            model, files.val, lengths, bytes_per_token=tokenizer.bytes_per_token, progress=progress, **protocol
        )
    c, used = model.config, protocol if protocol["protocol"] == "sliding" else protocol | {"stride": None}
    network = {"pos": c.pos, "scaling": c.scaling, "train_length": c.train_length, "tokenizer": tokenizer.name}
    data = {"corpus": files.meta["corpus"], "fingerprint": files.fingerprint}
    return {**about, **network, **data, "precision": precision, **used, "rows": rows}


def default_lengths(train_length: int, multiples: Sequence[float] = MULTIPLES) -> list[int]:
    return sorted({max(1, round(multiple * train_length)) for multiple in multiples})


def default_stride(train_length: int, lengths: Sequence[int]) -> int:
    """Half the training length, but no more than the shortest length; 1 for no lengths, which are refused later."""
    return max(1, min(train_length // 2, min(lengths, default=1)))


def digits(value: float, error: float | None, show_error: bool = True) -> str:
    """A number with no more digits than its standard error allows, two of the error's own."""
    if error is None or not 0 < error < math.inf:
        return f"{value:.4g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{places}f} ± {error:.{places}f}" if show_error else f"{value:.{places}f}"


def with_error(row: dict) -> str:
    """Perplexity ± its standard error (perplexity · stderr, the delta method), or why there is none."""
    if row["nll"] is None:
        return row["note"]
    return digits(row["perplexity"], None if row["stderr"] is None else row["perplexity"] * row["stderr"])


def _bits(row: dict) -> str:
    bits = row.get("bits_per_byte")
    if bits is None:
        return ""
    return digits(bits, bits * row["stderr"] / row["nll"] if row["stderr"] and row["nll"] else None, show_error=False)


def table(results: list[dict]) -> str:
    """A text table, one row a length. One run: perplexity, bits per byte, perplexity ÷ that at the training length.

    Several: a column a run, first of perplexities, then of bits per byte.
    """
    lengths = ["length", *(str(row["length"]) for row in results[0]["rows"])]
    if len(results) > 1:
        blocks = [[lengths, *([r["run"], *map(show, r["rows"])] for r in results)] for show in (with_error, _bits)]
        return f"perplexity\n{_aligned(blocks[0])}\n\nbits per byte\n{_aligned(blocks[1])}"
    rows, train_length = results[0]["rows"], results[0]["train_length"]
    base = next((row["nll"] for row in rows if row["length"] == train_length), None)
    ratios = ["" if None in (base, row["nll"]) else f"{_exp(row['nll'] - base):.3g}" for row in rows]
    perplexities, bits = ["perplexity", *map(with_error, rows)], ["bits/byte", *map(_bits, rows)]
    return _aligned([lengths, perplexities, bits, [f"÷ at {train_length}", *ratios]])


def _aligned(columns: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in columns]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in zip(*columns, strict=True))


def plot(results: list[dict], path: Path) -> None:
    """One curve a run, perplexity over length, as a PNG; error bars are one standard error."""
    from matplotlib import ticker
    from matplotlib.figure import Figure  # not pyplot: a notebook's backend is left alone

    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
    markers = "osDv^<>P*"  # more than colours: no two of the first 63 curves look the same
    figure = Figure(figsize=(7 if len(results) <= 3 else 10, 4.5), layout="constrained")
    axes = figure.subplots()
    values = []
    for result, colour, marker in zip(results, cycle(colours), cycle(markers), strict=False):
        rows = [row for row in map(runs.finite, result["rows"]) if row["perplexity"] is not None]
        lengths, perplexities = [row["length"] for row in rows], [row["perplexity"] for row in rows]
        errors = [row["perplexity"] * (row["stderr"] or 0) for row in rows]
        label = "\u200b" + result["run"].replace("$", r"\$")  # no formula, and no leading _, which hides it
        ended = next((row["note"] for row in result["rows"] if row["nll"] is None), None)
        if ended:
            label += f" ({ended})"
        axes.errorbar(lengths, perplexities, yerr=errors, marker=marker, capsize=3, color=colour, label=label)
        if ended and rows:
            axes.plot(lengths[-1], perplexities[-1], marker="x", markersize=14, markeredgewidth=2.5, color=colour)
        values += perplexities
    for train_length in sorted({result["train_length"] for result in results}):
        axes.axvline(train_length, color="#777777", linestyle="--", linewidth=1, zorder=0)
        place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": "top"}
        axes.text(train_length, 0.99, f"training length {train_length}", color="#555555", fontsize=9, **place)
    all_lengths = sorted({row["length"] for result in results for row in result["rows"]})
    axes.set_xscale("log", base=2)
    axes.set_xlim(all_lengths[0] / 1.25, all_lengths[-1] * 1.1)
    if values and max(values) > 3 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_xticks(all_lengths, [str(length) for length in all_lengths], rotation=45 if len(all_lengths) > 6 else 0)
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set(xlabel="tokens of context evaluated (log scale)", ylabel="validation perplexity")
    axes.set_title(f"Length extrapolation, {results[0]['protocol']} windows", fontsize=11)
    axes.grid(alpha=0.25)
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if len(results) > 3 else {}  # there it hides no curve
    axes.legend(frameon=False, **beside)
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def log_curve(result: dict, prefix: str, record: Callable[[dict], None], wandb_run: runs.WandbRun) -> None:
    """The curve as metrics with length as their x-axis, and a summary value a length to sort runs by."""
    rows = [row for row in result["rows"] if row["nll"] is not None]
    for row in rows:
        values = {f"{prefix}/{key}": row.get(key) for key in ("nll", "perplexity", "stderr", "bits_per_byte")}
        record({"extrapolation/length": row["length"], **values})
    wandb_run.summary({f"{prefix}/perplexity_{row['length']}": row["perplexity"] for row in rows})


def write_report(results: list[dict], folder: Path) -> None:
    """extrapolation.json and extrapolation.png: the object of one run, or a list of several."""
    safe = [{**result, "rows": [runs.finite(row) for row in result["rows"]]} for result in results]
    folder.mkdir(parents=True, exist_ok=True)
    runs.write_text(folder / "extrapolation.json", json.dumps(safe if len(safe) > 1 else safe[0], indent=1) + "\n")
    plot(results, folder / "extrapolation.png")


def _folders(config: DictConfig) -> list[Path]:
    if config.runs is None:
        return [runs.latest_run(Path(config.root))]
    given = [config.runs] if isinstance(config.runs, str) else list(config.runs)
    if not given:
        raise ValueError("runs=[]: give at least one run folder, or leave it out for the latest run")
    return list({path.resolve(): path for path in (Path(str(name)).expanduser() for name in given)}.values())


def evaluate_runs(config: DictConfig) -> list[dict]:
    """Measure every run of the configuration, print the table, write the files and log to wandb."""
    config = runs.checked(config, EvalConfig)
    runs.require(config, {"stride": 1, "max_targets": 1})
    if config.protocol not in PROTOCOLS:
        raise ValueError(f"protocol={config.protocol!r}: use {' or '.join(PROTOCOLS)}")
    mode, device = runs.wandb_mode(config.wandb.mode), runs.pick_device(config.device)
    precision = runs.pick_precision(config.precision, device)
    folders = _folders(config)
    out = Path(config.out).expanduser() if config.out else folders[0]
    if len(folders) > 1 and not config.out:
        out = Path(config.root) / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_comparison"
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out}: is a file; give a folder")
    scaling = OmegaConf.to_container(config)["scaling"]
    sources, checkpoints = [*map(runs.read_run, folders)], [*map(latest_checkpoint, folders)]
    models = [load_weights(path, device, scaling) for path in checkpoints]  # all of them before any is measured
    train_length = min(model.config.train_length for model in models)
    lengths = sorted(set(config.lengths)) if config.lengths is not None else default_lengths(train_length)
    stride = config.stride if config.stride is not None else default_stride(train_length, lengths)
    protocol = {"protocol": config.protocol, "stride": stride, "max_targets": config.max_targets}
    log.info("%s windows on %s in %s, lengths %s", config.protocol, device, precision, ", ".join(map(str, lengths)))
    results = []
    names = [setting.name for setting, _ in sources]
    for folder, (setting, origin), path, model in zip(folders, sources, checkpoints, models, strict=True):
        tokenizer = get_tokenizer(setting.tokenizer.name)
        files = prepare(DataConfig(**setting.data), tokenizer, say=log.info)
        name = setting.name if names.count(setting.name) == 1 else folder.resolve().name
        about = {"run": name if scaling is None else f"{name} {scaling['name']}", "folder": str(folder)}
        about |= {"checkpoint": path.stem, "trained_on": origin["fingerprint"]}
        results.append(measure_run(model, files, tokenizer, lengths, precision, about, progress=True, **protocol))
    print(table(results))
    for note in comparability(results):
        log.warning("note: %s", note)
    write_report(results, out)
    for folder, (setting, origin), result in zip(folders, sources, results, strict=True):
        if out != folder and not (config.out and len(results) == 1):
            write_report([result], folder)
        settings = OmegaConf.merge(setting.wandb, {"mode": mode if setting.wandb.mode != "disabled" else "disabled"})
        wandb_run = runs.start_wandb(settings, folder, origin["wandb_id"], name=setting.name)
        used = result["scaling"] or {}
        stretched = "".join(f"_{used[key]}" for key in ("name", "factor") if used.get(key))
        log_curve(result, f"extrapolation/{config.protocol}{stretched}", wandb_run.log, wandb_run)
        wandb_run.finish(failed=False)
    log.info("wrote    %s", out / "extrapolation.{json,png}")
    return results


def comparability(results: list[dict]) -> list[str]:
    """What a reader must know before comparing these numbers."""
    notes = [
        f"{result['run']} was trained on data {result['trained_on']}, but {result['corpus']} is now "
        f"{result['fingerprint']}: validation text may have been in its training text"
        for result in results
        if result["trained_on"] != result["fingerprint"]
    ]
    if len({result["fingerprint"] for result in results}) > 1:
        notes.append("these runs are measured on different data: their numbers cannot be compared")
    elif len({result["tokenizer"] for result in results}) > 1:
        notes.append("these runs have different tokenizers: compare bits per byte, perplexities are per token")
    return notes


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(config: DictConfig) -> None:
    with runs.clear_errors():
        evaluate_runs(config)


if __name__ == "__main__":
    main()
