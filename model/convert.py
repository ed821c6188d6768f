"""A trained rotary model in the other pairing: rows of queries and keys rearranged, logits equal.

    python -m model.convert outputs/<run> interleaved [--out <new folder>]

`half` pairs dimensions (i, i + r/2) of a head, `interleaved` (2i, 2i + 1), r being the rotary width. A score is a sum
over dimensions, so queries and keys that are rearranged alike, and turned in the new pairs, have the scores they had.

The new folder (by default <run>_<layout>) holds config.yaml and the weights of the latest checkpoint, not the
optimiser's state: the new run can be evaluated and started from (init_from= and the same pos.layout=), but not resumed.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import latest_checkpoint, load_weights, new_folder, save_checkpoint, step_of
from model.gpt import GPT
from model.rope import LAYOUTS


def permutation(rotary_dim: int, source: str, target: str) -> Tensor:
    """int64 (rotary_dim,): x[..., permutation] holds in layout `target` what x (..., rotary_dim) holds in `source`."""
    order = torch.arange(rotary_dim)
    return order if source == target else order.view((2, -1) if source == "half" else (-1, 2)).T.flatten()


def convert_layout(model: GPT, layout: str) -> GPT:
    """A new model with pos.layout=layout and the same logits up to rounding; the given one is left as it is.

    Rows of each block's attention.qkv move: of every query and key head the first part, which turns. Dtype, device and
    mode are kept. Raises ValueError for a layout that is not known and a scheme that has none.
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


def read_settings(run: Path) -> dict:
    """A run's config.yaml as plain values, with its `provenance`. FileNotFoundError where there is none."""
    from omegaconf import OmegaConf

    if not (run / "config.yaml").is_file():
        raise FileNotFoundError(f"{run}: not a run folder (it has no config.yaml)")
    return OmegaConf.to_container(OmegaConf.load(run / "config.yaml"), resolve=False)


def write_settings(run: Path, settings: dict) -> None:
    """Plain values as a run's config.yaml."""
    from omegaconf import OmegaConf

    OmegaConf.save(OmegaConf.create(settings), run / "config.yaml")


def convert_run(run: str | Path, layout: str, out: str | Path | None = None) -> Path:
    """Write the run in the other layout to a new folder, under a new name and without its wandb_id; returns the folder.

    Raises FileNotFoundError where the run, its checkpoint or its config.yaml is missing, and ValueError where `out`
    exists, the checkpoint is damaged, or the layout is not known, not new to the run or not the scheme's.
    """
    run = Path(os.path.abspath(run))
    weights = latest_checkpoint(run)
    model, settings = load_weights(weights), read_settings(run)
    converted = convert_layout(model, layout)
    if model.config.pos["layout"] == layout:
        raise ValueError(f"layout={layout}: {run} has this layout already")
    settings["name"] = f"{settings['name']}_{layout}"
    settings["pos"]["layout"] = layout
    settings["provenance"]["wandb_id"] = None
    out = run.with_name(f"{run.name}_{layout}") if out is None else Path(os.path.abspath(out))
    with new_folder(out) as folder:
        save_checkpoint(folder, step_of(weights), converted.config, converted.state_dict())
        write_settings(folder, settings)
    return out


def main(words: list[str] | None = None) -> None:
    """The command; exits with status 2 and a message where a user can mend what is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m model.convert", description=__doc__, formatter_class=raw)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--out", help="the new folder; default <run>_<layout>")
    given = parser.parse_args(words)
    try:
        out = convert_run(**vars(given))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"wrote {out}: pos.layout={given.layout}, with the logits of {given.run}")
    print(f"It can be evaluated, or started from (init_from={out} pos.layout={given.layout}), but not resumed.")


if __name__ == "__main__":
    main()
