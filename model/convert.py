"""A trained rotary model in the other pairing: queries and keys rearranged, logits equal.

    python -m model.convert run=outputs/<run> layout=interleaved [out=<new folder>]

`half` pairs dimensions (i, i + r/2) of a head, `interleaved` (2i, 2i + 1), r being the rotary width. A score is a sum
over dimensions, so queries and keys that are rearranged alike, and turned in the new pairs, have the scores they had.

The new folder (by default <run>_<layout>) holds config.yaml and the weights of the latest checkpoint. The optimiser's
state is left behind: its moments are in the old order. So the new run can be evaluated and started from with init_from=
(and the same pos.layout=, which the weights' shapes do not tell), but not resumed.
"""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import latest_checkpoint, load_weights, new_folder, save_checkpoint
from model.gpt import GPT
from model.safety import printable, read_text

USAGE = "use run=<run folder> layout=half or interleaved, and out=<new folder> for another than <run>_<layout>"
# A YAML string on one line: in single or double quotes, or plain without a comment behind it.
ONE_LINE = r"""'(?:[^'\n]|'')*'|"(?:[^"\\\n]|\\.)*"|[^'"|>](?:(?! #).)*"""


def permutation(rotary_dim: int, source: str, target: str) -> Tensor:
    """int64 (rotary_dim,): x[..., permutation] holds in layout `target` what x (..., rotary_dim) holds in `source`."""
    order = torch.arange(rotary_dim)
    if source == target:
        return order
    return order.view((2, -1) if source == "half" else (-1, 2)).T.flatten()


def convert_layout(model: GPT, layout: str) -> GPT:
    """A new model with pos.layout=layout and the same logits up to rounding; the given one is left as it is.

    All that moves are rows of each block's attention.qkv, weight ((n_head + 2 n_kv_head) · head_dim, D) and bias: of
    every query and key head the first part, which turns. Dtype, device and mode are kept. Raises ValueError for a
    layout that is not known and a scheme that has none.
    """
    config = model.config
    if config.pos["name"] != "rope":
        raise ValueError(f"pos={config.pos['name']}: has no layout to convert, only pos=rope has")
    with torch.device("meta"):  # no weights are drawn; a layout that is not known is refused here
        converted = GPT(replace(config, pos={**config.pos, "layout": layout}))
    order = permutation(model.pos.rotary_dim, config.pos["layout"], layout)
    rows = torch.arange((config.n_head + 2 * config.n_kv_head) * config.head_dim).view(-1, config.head_dim)
    turning = rows[: config.n_head + config.n_kv_head, : len(order)]  # a view: query heads, then key heads
    turning.copy_(turning[:, order])
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in (name for name in tensors if ".attention.qkv." in name):
        tensors[name] = tensors[name][rows.flatten().to(tensors[name].device)]
    converted.load_state_dict(tensors, assign=True)
    return converted.train(model.training)


def _value(text: str, key: str, pattern: str) -> tuple[int, int]:
    """Where a value stands in YAML: of a key at the top level or in a block of it. ValueError unless once, as told."""
    block, _, name = key.rpartition(".")
    inside = re.search(rf"^{block}:\n(?:(?: .*)?\n)*" if block else r"[\s\S]*", text, re.MULTILINE)
    indent = "  " if block else ""
    line = re.compile(rf"^{indent}{name}: (.*(?:\n{indent} .*)*)$", re.MULTILINE)
    found = [*line.finditer(text, *inside.span())] if inside else []
    if len(found) != 1 or not re.fullmatch(pattern, found[0][1]):
        values = " and ".join(repr(match[1]) for match in found) or "none"
        raise ValueError(f"{key}: expected once, on one line, as train.py writes it; found {values}")
    return found[0].span(1)


def convert_config(text: str, source: str, target: str) -> str:
    """The text of a config.yaml with three lines changed, all else to the letter as it was.

    pos.layout becomes `target`, the name gets it as its ending, and provenance.wandb_id becomes null, so that the new
    run does not log into the old one's wandb run. Raises ValueError where one of them is not as train.py writes it.
    """
    start, end = _value(text, "name", ONE_LINE)
    end -= text[start] in "'\""
    text = f"{text[:end]}_{target}{text[end:]}"
    for key, old, new in (("pos.layout", source, target), ("provenance.wandb_id", ".+", "null")):
        start, end = _value(text, key, old)
        text = text[:start] + new + text[end:]
    return text


def convert_run(run: str | Path, layout: str, out: str | Path | None = None) -> Path:
    """Write the run in the other layout to a new folder, whole or not at all; returns the folder.

    Raises FileNotFoundError where the run, its checkpoint or its config.yaml is missing, and ValueError where `out`
    exists, a file of the run is damaged, or the layout is not known, not new to the run or not the scheme's.
    """
    run = Path(os.path.abspath(Path(run).expanduser()))
    weights = latest_checkpoint(run)
    model = load_weights(weights)
    converted = convert_layout(model, layout)
    source = model.config.pos["layout"]
    if source == layout:
        raise ValueError(f"layout={layout}: {run} has this layout already")
    path = run / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{run}: not a run folder (it has no config.yaml)")
    try:
        text = convert_config(read_text(path), source, layout)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    out = run.with_name(f"{run.name}_{layout}") if out is None else Path(os.path.abspath(Path(out).expanduser()))
    with new_folder(out) as temporary:
        step = int(weights.stem.removeprefix("step_"))
        save_checkpoint(temporary, step, converted, None)
        (temporary / "config.yaml").write_text(text, encoding="utf-8")
    return out


def read_words(words: list[str], needed: set[str], others: set[str], usage: str) -> dict[str, str]:
    """key=value words as a dictionary. ValueError, saying what is allowed, for others and where a needed one lacks."""
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    wrong = [word for word in words if not re.match(rf"({'|'.join(needed | others)})=.", word)]
    if wrong or not needed <= set(given):
        raise ValueError(f"{wrong[0]!r} is no setting here; {usage}" if wrong else usage)
    return given


def main(words: list[str]) -> int:
    """The command; returns its exit status, 2 where a user can mend what is wrong."""
    try:
        given = read_words(words, {"run", "layout"}, {"out"}, USAGE)
        out = convert_run(**given)
    except (ValueError, OSError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    print(f"wrote {out}: pos.layout={given['layout']}, with the logits of {given['run']}")
    print(f"It can be evaluated, or started from (init_from={out} pos.layout={given['layout']}), but not resumed.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
