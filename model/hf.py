"""Runs to Hugging Face's `transformers`, and its checkpoints to runs. Needs `pip install -e '.[hf]'`.

    python -m model.hf export outputs/<run> <new folder>
    python -m model.hf import <folder or hub id> <new run folder> outputs/<run>

AutoModelForCausalLM and AutoTokenizer open the exported folder without code of ours. An imported run gets the text and
other settings of outputs/<run>; it can be measured and started from (init_from=), not resumed.
"""

import argparse
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

try:
    import transformers
    from transformers.convert_slow_tokenizer import TikTokenConverter
except ImportError as error:
    raise SystemExit(f"error: {error}; `pip install -e '.[hf]'` brings it") from error

from data.tokenizers import Tokenizer, get_tokenizer
from model.checkpoint import latest_checkpoint, load_weights, new_folder, save_checkpoint, write_text
from model.gpt import GPT
from model.hf_weights import check_architecture, from_transformers, to_transformers

# A text that an exported tokenizer has to cut as ours does.
PROBE = "def f(x):\n\treturn 'naïve'  # 漢字 don't 1234567 \U0001f469\u200d\U0001f4bb\r\n\n   end "
CARD = "---\nlibrary_name: transformers\n---\n\nTrained with Ropewalk. {}\n\n````yaml\n{}````\n"


@torch.inference_mode()
def compare_logits(ours: GPT, theirs: Any, length: int) -> str:
    """In words, how far logits of transformers are from ours on `length` random tokens. ValueError if too far."""
    tokens = torch.randint(ours.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    logits = ours(tokens)
    difference, largest = (logits - theirs(tokens).logits).abs().max().item(), logits.abs().max().item()
    said = f"on {length} random tokens the logits differ by at most {difference:.1e} (the largest is {largest:.3g})"
    if not difference <= 1e-4 * max(1.0, largest):  # float32 angles at position 2,000 cost as much
        raise ValueError(f"transformers {transformers.__version__}: {said}; not written, please report it")
    return said


def export_run(run: str | Path, out: str | Path) -> str:
    """Write a run's latest checkpoint as a folder of transformers; returns a line for the user.

    OSError where the run is incomplete, ValueError where `out` exists, nothing there is equal, or the logits differ.
    """
    run = Path(run)
    model, settings = load_weights(latest_checkpoint(run)), OmegaConf.load(run / "config.yaml")
    if settings.get("task"):
        raise ValueError(f"{run}: was trained on data=task, whose symbols no tokenizer has; such a run is not exported")
    try:
        ours = get_tokenizer(**settings["tokenizer"])
        tokenizer, end, said = make_tokenizer(ours), ours.end_of_document, "with a tokenizer"
    except ValueError as error:
        tokenizer, end, said = None, None, f"without a tokenizer (AutoTokenizer would make up an empty one): {error}"
    exported = to_transformers(model, end)
    length = min(2 * model.config.train_length, model.pos.max_length or 2048, 2048)
    compared = compare_logits(model, exported, length)
    said = f"{type(exported).__name__} of transformers {transformers.__version__}, {said}; {compared}"
    with new_folder(out) as folder:
        for part in filter(None, (exported, tokenizer)):
            part.save_pretrained(folder)
        write_text(folder / "README.md", CARD.format(said, (run / "config.yaml").read_text(encoding="utf-8")))
        with suppress(FileNotFoundError):
            shutil.copy(run / "extrapolation.json", folder)
    return f"wrote {out}: {said}"


def make_tokenizer(ours: Tokenizer) -> Any:
    """The same as a tokenizer of transformers. ValueError where that cuts a text otherwise."""
    encoding, end = ours._encoding, "<|endoftext|>"
    converter = TikTokenConverter(pattern=encoding._pat_str, extra_special_tokens=encoding._special_tokens)
    converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks  # which is here, not in a file
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=converter.converted(), bos_token=end, eos_token=end)
    if made.encode(PROBE + end) != encoding.encode(PROBE + end, allowed_special="all"):
        raise ValueError(f"tokenizer.name={ours.name}: no tokenizer of transformers has its ids")
    return made


def import_run(name: str, out: str | Path, like: str | Path) -> str:
    """Write a checkpoint of transformers, a folder or an id on the hub, as a run folder; returns lines for the user.

    Nothing in it is executed. ValueError or OSError where it does not fit (from_transformers) or has other logits here.
    """
    settings = OmegaConf.to_container(OmegaConf.load(Path(like) / "config.yaml"))
    with new_folder(out) as folder:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_architecture(config)  # before the weights are downloaded
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        if keys := sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]])):
            raise ValueError(f"{name}: missing or unexpected weights: {', '.join(keys)}")
        model = from_transformers(theirs.eval())
        c, own = model.config, asdict(model.config)
        compared = compare_logits(model, theirs, min(c.train_length, 2048))
        # init_from tells two imported checkpoints of one shape apart: they are no two seeds of one run
        settings |= {"name": Path(out).name, "seed": 0, "resume": None, "init_from": name}
        tokenizer = _find_tokenizer(name, c.vocab_size)
        settings |= {"tokenizer": tokenizer or {"name": name}, "wandb": {"mode": "disabled"}}
        settings |= {"pos": own.pop("pos"), "scaling": own.pop("scaling") or {"name": "none"}}
        settings["model"] = {key: value for key, value in own.items() if key != "vocab_size"}
        settings["provenance"] = {"command": shlex.join(sys.argv), "fingerprint": "unknown", "wandb_id": None}
        save_checkpoint(folder, 0, c, model.state_dict())
        OmegaConf.save(OmegaConf.create(settings), folder / "config.yaml")
    way = f"python eval.py runs={out}" if tokenizer else "only with load_run, in Python: its tokenizer is none of ours"
    return f"wrote {out}: {type(theirs).__name__} as pos={c.pos['name']}; {compared}\nmeasure it: {way}"


def _find_tokenizer(source: str, vocab_size: int) -> dict | None:
    """The settings of our tokenizer that cuts a text as `source`'s does; None where none of ours does."""
    known = {257: {"name": "bytes"}, 50257: {"name": "gpt2"}}
    found = known.get(vocab_size, {"name": "gpt2", "vocab_size": vocab_size})
    with suppress(ValueError, OSError):
        theirs = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if [theirs.encode(PROBE)] == get_tokenizer(**found).encode([PROBE]):
            return found
    return None


def main(words: list[str] | None = None) -> None:
    """The command; exits with status 2 and a message where a user can mend what is wrong."""
    parser = argparse.ArgumentParser("python -m model.hf", description=__doc__.partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    for action, words_of in (("export", ("run", "out")), ("import", ("name", "out", "like"))):
        sub = actions.add_parser(action)
        for word in words_of:
            sub.add_argument(word)
    given = vars(parser.parse_args(words))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        said = {"export": export_run, "import": import_run}[given.pop("action")](**given)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(said)


if __name__ == "__main__":
    main()
