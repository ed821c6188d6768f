"""Runs to Hugging Face's `transformers`, and its checkpoints to runs. Needs `pip install -e '.[hf]'`.

    python -m model.hf export run=outputs/<run> out=<new folder>
    python -m model.hf import name=<folder or hub id> out=<new run folder> [like=outputs/<run>]

The exported folder is opened by AutoModelForCausalLM and AutoTokenizer without any code of ours; a README.md in it says
where it came from, and what was measured. An imported run can be measured and started from (init_from=), not resumed.
`like` is a run whose text and other settings the new one gets: the text to be measured on. Which architectures fit, and
what is refused, is told in model/hf_weights.py.
"""

import hashlib
import json
import platform
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import latest_checkpoint, load_weights, new_folder, read_config, save_checkpoint
from model.config import GPTConfig
from model.convert import read_words
from model.gpt import GPT
from model.hf_weights import (
    LENGTH_DEPENDENT,
    OLDEST,
    check_architecture,
    from_transformers,
    to_transformers,
    transformers,
)
from model.safety import check_folder, printable, read_text, read_yaml_text

USAGE = (
    "use export run=<run folder> out=<new folder>, or import name=<folder or hub id> out=<new run folder> and "
    "like=<run folder> for its text and settings"
)
END_OF_DOCUMENT = "<|endoftext|>"
# SHA-256 of GPT-2's vocabulary: the JSON of its [token, id] pairs by id, as openai-community/gpt2 has it.
GPT2_VOCABULARY = "140f02bb05c0d82c3e45f14050c6be40a9b6fe2773b7dfce0fbb815918c30199"
# A text that a tokenizer has to cut as ours does before it is written.
PROBE = "def f(x):\n\treturn 'naïve'  # 漢字 don't 1234567 \U0001f469\u200d\U0001f4bb\r\n\n   end "
# What older checkpoints hold beside their weights: causal masks and frequencies.
CONSTANTS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
TOLERANCE = 1e-4  # of logits, next to the largest: what float32 angles at position 2,000 may come to

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [ropewalk, length-extrapolation]
---

# {name}

{about}

Logits were compared with the run's on {length} random tokens (trained on windows of {train_length}): the largest \
difference is {difference:.1e}, next to a largest logit of {largest:.3g}.
{notes}
## Measured

{measured}

## Settings

{fence}yaml
{settings}{fence}
"""


# ---- out ------------------------------------------------------------------------------------------------------------


def export_run(run: str | Path, out: str | Path) -> list[str]:
    """Write a run's latest checkpoint as a folder of transformers, whole or not at all; returns what there is to say.

    Raises FileNotFoundError where the run is incomplete, and ValueError where `out` exists, a file is damaged, or the
    model has no exact equal there (to_transformers).
    """
    run, library = Path(run).expanduser(), transformers()
    weights = latest_checkpoint(run)
    model, (text, settings) = load_weights(weights), _read_settings(run)
    c, notes = model.config, []
    try:
        tokenizer = make_tokenizer(settings["tokenizer"]["name"], c.vocab_size)
    except ValueError as error:
        tokenizer = None
        notes.append(_plain(f"Without a tokenizer: {error}"))
    known = tokenizer or settings["tokenizer"]["name"] == "gpt2"  # whose end of a document is its last id
    exported = to_transformers(model, c.vocab_size - 1 if known else None)
    if c.scaling and c.scaling["name"] in LENGTH_DEPENDENT:
        notes.append(
            f"scaling={c.scaling['name']}: frequencies change with the length, and transformers does not turn cached "
            "keys anew, so use_cache is off here; leave it off."
        )
    if c.scaling and c.scaling["name"] == "dynamic":
        notes.append(
            "transformers keeps the frequencies of the longest sequence so far for all shorter ones that are longer "
            f"than {c.original_length}: load the model anew, or pass sequences by rising length."
        )
    checked = _compare(model, exported)
    with new_folder(out) as folder:
        exported.save_pretrained(folder)
        if tokenizer:
            tokenizer.save_pretrained(folder)
        shown = "".join(f"\n{note}\n" for note in notes)
        about = f"{c.n_layer} layers of {c.n_head} heads, pos={c.pos['name']}, checkpoint {weights.stem}. Trained with "
        about += f"Ropewalk, and rearranged as {type(exported).__name__} of transformers {library.__version__}. "
        about += "Versions before {}.{} read some rotary settings otherwise.".format(*OLDEST)
        fence = "`" * (1 + max(map(len, re.findall("`{3,}", text)), default=3))  # that nothing in the text ends
        card = CARD.format(
            name=_plain(settings.get("name", run.name)), about=about, train_length=c.train_length, notes=shown,
            measured=_measured(run, weights.stem), settings=text, fence=fence, **checked,
        )  # fmt: skip
        (folder / "README.md").write_text(card, encoding="utf-8")
    said = f"{type(exported).__name__}, {'with' if tokenizer else 'without'} a tokenizer"
    difference = f"on {checked['length']} tokens the logits differ by at most {checked['difference']:.1e}"
    return [f"wrote {out}: {said}; {difference}", *notes]


def _read_settings(run: Path) -> tuple[str, dict]:
    """A run's config.yaml, as text and as plain values."""
    import yaml

    path = run / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{run}: not a run folder (it has no config.yaml)")
    check_folder(run)
    try:
        text = read_yaml_text(path)
        settings = yaml.safe_load(text)
        if not all(isinstance(settings[block]["name"], str) for block in ("tokenizer", "data")):
            raise ValueError("tokenizer.name or data.name is no name")
    except (ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not a configuration written by train.py ({error!r})") from error
    return text, settings


@torch.inference_mode()
def _compare(model: GPT, exported: Any) -> dict:
    """The largest difference of logits, past the training length where there are positions. ValueError if too large."""
    length = min(2 * model.config.train_length, model.pos.max_length or 2048, 2048)
    tokens = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    ours = model(tokens)
    difference, largest = (ours - exported(tokens).logits).abs().max().item(), ours.abs().max().item()
    if not difference <= TOLERANCE * max(1.0, largest):
        raise ValueError(
            f"logits of transformers {transformers().__version__} differ by {difference:.1e} on {length} tokens (the "
            f"largest is {largest:.3g}): not written; please report it"
        )
    return {"length": length, "difference": difference, "largest": largest}


def make_tokenizer(name: str, vocab_size: int) -> Any:
    """A tokenizer of transformers with the ids of tokenizer.name=`name`: `bytes`, or a tiktoken encoding by its name.

    vocab_size: below an encoding's own, its first vocab_size - 257 merges, then the end of a document. Unlike ours it
    reads <|endoftext|> in a text as that token. Raises ValueError where the vocabulary is not here, or does not fit.
    """
    import tiktoken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if name == "bytes":
        ranks, pattern = {bytes([value]): value for value in range(256)}, r"[\s\S]{1,32}"
    else:
        try:
            encoding = tiktoken.get_encoding(name)
        except (ValueError, OSError) as error:  # not known; or not here, and not to be had
            raise ValueError(f"tokenizer.name={name}: tiktoken has not got its vocabulary ({error})") from error
        ranks, pattern = encoding._mergeable_ranks, encoding._pat_str
    ranks = {token: rank for token, rank in ranks.items() if rank < vocab_size - 1}
    special = {END_OF_DOCUMENT: vocab_size - 1}
    converter = TikTokenConverter(pattern=pattern, extra_special_tokens=special)
    converter.load_tiktoken_bpe = lambda _: ranks  # they are here already, not in a file
    made = PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), bos_token=END_OF_DOCUMENT, eos_token=END_OF_DOCUMENT
    )
    if len(ranks) == vocab_size - 1:
        ours = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        if (len(made), made.eos_token_id) == (vocab_size, vocab_size - 1) and made.encode(PROBE) == ours.encode(PROBE):
            return made
    raise ValueError(f"tokenizer.name={name} with {vocab_size} ids: cannot be written as a tokenizer of transformers")


def _measured(run: Path, checkpoint: str) -> str:
    """extrapolation.json as tables in Markdown."""
    path = run / "extrapolation.json"
    if not path.is_file():
        return "Nothing yet: the run has no extrapolation.json, which `python eval.py` writes."
    try:
        document = json.loads(read_text(path, most=1 << 26))
        return "\n\n".join(_table(result, checkpoint) for result in document.get("results", [document]))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path}: not written by eval.py ({error!r}); delete it, or measure anew") from error


def _table(result: dict, checkpoint: str) -> str:
    scaling = (result["scaling"] or {"name": "none"})["name"]
    stride = f" of stride {result['stride']}" if result["stride"] else ""
    where = f"{result['corpus']} (fingerprint {result['fingerprint']}), {result['protocol']} windows{stride}"
    lines = [_plain(f"{result['checkpoint']}, scaling {scaling}, on {where}, in {result['precision']}:"), ""]
    if result["checkpoint"] != checkpoint:
        lines[0] = f"An earlier checkpoint than the one here, {lines[0]}"
    lines += ["| length | perplexity | bits per byte | nll (nats per token) | tokens scored |", "|--:|--:|--:|--:|--:|"]
    for row in result["rows"]:
        if row["nll"] is None:
            lines.append(f"| {_plain(row['length'])} | {_plain(row['note'])} | | | |")
            continue
        bits = "" if row.get("bits_per_byte") is None else f"{row['bits_per_byte']:.4f}"
        error = "" if row["stderr"] is None else f" ± {row['stderr']:.4f}"
        lines.append(
            f"| {_plain(row['length'])} | {row['perplexity']:.3f} | {bits} | {row['nll']:.4f}{error} | "
            f"{_plain(row['scored'])} |"
        )
    return "\n".join(lines)


def _plain(text: object) -> str:
    """Words from a run, on one line, as text of a card: no links, no pictures, no HTML, no other cells."""
    return re.sub(r"[\\`\[\]<>|&]", r"\\\g<0>", " ".join(printable(text).split()))


# ---- in -------------------------------------------------------------------------------------------------------------


def import_run(name: str, out: str | Path, like: str | Path | None = None) -> list[str]:
    """Write a checkpoint of transformers as a run folder, whole or not at all; returns what there is to say.

    name: a folder, or an id on the hub. Nothing in it is executed. Raises ValueError or FileNotFoundError where it
    cannot be read or does not fit (from_transformers), and where `out` exists.
    """
    library, like = transformers(), Path(like).expanduser() if like else None
    others = _read_settings(like)[1] if like else _default_settings()
    with new_folder(out) as folder:
        theirs = _load(library, name)
        try:
            model, notes = from_transformers(theirs)
        except ValueError as error:
            raise ValueError(f"name={name}: {error}") from error
        c = model.config
        tokenizer, note = _recognise(library, theirs.name_or_path, c, like)
        save_checkpoint(folder, 0, model, None)
        # Two checkpoints of one shape are no two seeds of one run: init_from tells them apart.
        own = {"name": Path(out).name, "seed": 0, "init_from": name, "tokenizer": tokenizer or {"name": name}}
        settings = _settings(others, own, c)
        settings["provenance"] |= {"transformers": library.__version__, "notes": notes}
        _write_yaml(folder / "config.yaml", settings)
    head = f"wrote {out}: {type(theirs).__name__} as pos={c.pos['name']}, train_length={c.train_length}, {note}"
    if tokenizer is None:
        return [head, *notes, "eval.py and train.py cannot read text for it; load_run, in Python, opens it"]
    text = settings["data"]["name"]
    return [
        head,
        *notes,
        f"measure it on data={text}: python eval.py runs=[{out}]",
        f"go on with it: python train.py init_from={out} {_overrides(c, tokenizer)}",
    ]


def _load(library: Any, name: str) -> Any:
    """The model, float32. ValueError or FileNotFoundError, naming it, for whatever is wrong."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and (folder.exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
        raise FileNotFoundError(f"name={name}: no such folder, and no id on the hub (owner/model) either")
    source = str(folder) if folder.is_dir() else name
    try:
        config = library.AutoConfig.from_pretrained(source, trust_remote_code=False)
        check_architecture(config)  # before the weights are downloaded
        model, info = library.AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
        for what in ("missing", "unexpected"):
            if keys := sorted(key for key in map(str, info[f"{what}_keys"]) if not CONSTANTS.search(key)):
                raise ValueError(f"{what} weights: {', '.join(keys[:5])}{' …' if keys[5:] else ''}")
    except Exception as error:  # whatever damage, or the network, happens to trigger
        reason = str(error).strip().split("\n")[0] or repr(error)
        if "Weights only load failed" in reason:  # what follows tells how to run what is in the file
            reason = "its weights file holds something else than tensors, and is not read"
        raise ValueError(f"name={name}: {reason}") from error
    return model.eval()


def _recognise(library: Any, source: str, c: GPTConfig, like: Path | None) -> tuple[dict | None, str]:
    """The settings of the tokenizer, None where it is none of ours, and a word on it for people."""
    try:
        vocabulary = library.AutoTokenizer.from_pretrained(source, trust_remote_code=False).get_vocab()
    except Exception:  # there is none, or a damaged one
        vocabulary = None
    if vocabulary and len(vocabulary) < 257:  # an empty one is made where there is none
        vocabulary = None
    by_size = {257: "bytes", 50257: "gpt2"}.get(c.vocab_size)
    if vocabulary is None and by_size:
        return {"name": by_size}, f"tokenizer={by_size} by its {c.vocab_size} ids, as no tokenizer is with it"
    if by_size and vocabulary_hash(vocabulary) == GPT2_VOCABULARY:
        return {"name": "gpt2"}, "tokenizer=gpt2"
    if by_size == "bytes" and vocabulary == make_tokenizer("bytes", 257).get_vocab():
        return {"name": "bytes"}, "tokenizer=bytes"
    if like and read_config(latest_checkpoint(like)).vocab_size == c.vocab_size:
        settings = _read_settings(like)[1]["tokenizer"]
        return settings, f"tokenizer={settings['name']}, as {like} has it, by its {c.vocab_size} ids"
    return None, f"a tokenizer of {c.vocab_size} ids that is none of ours"


def vocabulary_hash(vocabulary: dict[str, int]) -> str:
    pairs = sorted(vocabulary.items(), key=lambda pair: pair[1])
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _default_settings() -> dict:
    """What a run needs and an imported one has not: it was not trained here, so its training settings are zeros."""
    names = ("max_steps", "batch_size", "lr", "min_lr_ratio", "warmup_steps", "weight_decay", "beta1", "beta2")
    counts = ("grad_clip", "eval_every", "checkpoint_every", "log_every")
    return {
        "preset": "cpu",
        "data": {"name": "stdlib", "kind": "stdlib"},
        "train": dict.fromkeys((*names, *counts), 0),
        "val": {"multiples": [1.0, 1.25, 1.5, 2.0, 4.0]},
    }


def _settings(others: dict, own: dict, c: GPTConfig) -> dict:
    model = asdict(c)
    pos, scaling = model.pop("pos"), model.pop("scaling") or {"name": "none"}
    del model["vocab_size"]
    own |= {"model": model, "pos": pos, "scaling": scaling, "wandb": {"mode": "disabled"}}
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    own["provenance"] = {"command": shlex.join(sys.argv), **versions, "fingerprint": "not known", "wandb_id": None}
    return {**others, "resume": None, "init_table": None, **own}


def _write_yaml(path: Path, settings: dict) -> None:
    import yaml

    path.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=10**6), encoding="utf-8")


def _overrides(c: GPTConfig, tokenizer: dict) -> str:
    """train.py's settings under which it builds this model."""
    keys = ("n_layer", "n_head", "n_kv_head", "head_dim", "train_length", "bias")
    words = [f"tokenizer={tokenizer['name']}", f"pos={c.pos['name']}"]
    words += [f"pos.{key}={value}" for key, value in c.pos.items() if key != "name"]
    words += [f"model.{key}={getattr(c, key)}".lower() for key in keys]
    if c.scaling:
        words += [f"scaling={c.scaling['name']}"]
        words += [f"scaling.{key}={value}" for key, value in c.scaling.items() if key != "name"]
    return " ".join(words).replace("=None", "=null").replace(", ", ",")


def main(words: list[str]) -> int:
    """The command; returns its exit status, 2 where a user can mend what is wrong."""
    try:
        action = words[0] if words else None
        if action not in ("export", "import"):
            raise ValueError(USAGE)
        library = transformers()
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        if action == "export":
            said = export_run(**read_words(words[1:], {"run", "out"}, set(), USAGE))
        else:
            said = import_run(**read_words(words[1:], {"name", "out"}, {"like"}, USAGE))
    except (ValueError, OSError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    print("\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
