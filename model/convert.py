"""A trained rotary model in the other pairing: rows of queries and keys rearranged, logits equal.

    python -m model.convert outputs/<run> interleaved [--out <new folder>]

`half` pairs dimensions (i, i + r/2) of a head, `interleaved` (2i, 2i + 1), r being the rotary width. The new folder (by
default <run>_<layout>) can be evaluated and started from (init_from= and the same pos.layout=), not resumed.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import OmegaConf

from model.checkpoint import latest_checkpoint, load_weights, new_folder, save_checkpoint, step_of
from model.gpt import GPT
from model.rope import LAYOUTS


def convert_layout(model: GPT, layout: str) -> GPT:
    """A new model with pos.layout=layout, and the same logits up to rounding. ValueError where it has none such."""
    c = model.config
    if c.pos["name"] != "rope":
        raise ValueError(f"pos={c.pos['name']}: has no layout to convert, only pos=rope has")
    with torch.device("meta"):  # no weights are drawn
        converted = GPT(replace(c, pos={**c.pos, "layout": layout}))
    rows = torch.arange((c.n_head + 2 * c.n_kv_head) * c.head_dim).view(-1, c.head_dim)
    if layout != c.pos["layout"]:
        planes = torch.arange(model.pos.rotary_dim).view((2, -1) if layout == "interleaved" else (-1, 2))
        turning = rows[: c.n_head + c.n_kv_head, : model.pos.rotary_dim]  # a view: query heads, then key heads
        turning.copy_(turning[:, planes.T.flatten()])
    state = model.state_dict()
    tensors = {name: tensor[rows.flatten()] if ".qkv." in name else tensor.clone() for name, tensor in state.items()}
    converted.load_state_dict(tensors, assign=True)
    return converted.train(model.training)


def convert_run(run: str | Path, layout: str, out: str | Path | None = None) -> Path:
    """Write the run's latest checkpoint in another layout to a new folder; returns that. ValueError or OSError."""
    run = Path(run).absolute()
    weights = latest_checkpoint(run)
    model, settings = load_weights(weights), OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    converted = convert_layout(model, layout)
    if model.config.pos["layout"] == layout:
        raise ValueError(f"layout={layout}: {run} has this layout already")
    settings["name"], settings["pos"]["layout"] = f"{settings['name']}_{layout}", layout
    settings["provenance"]["wandb_id"] = None
    out = Path(out or f"{run}_{layout}").absolute()
    with new_folder(out) as folder:
        save_checkpoint(folder, step_of(weights), converted.config, converted.state_dict())
        OmegaConf.save(OmegaConf.create(settings), folder / "config.yaml")
    return out


def main(words: list[str] | None = None) -> None:
    """The command; exits with status 2 and a message where a user can mend what is wrong."""
    parser = argparse.ArgumentParser("python -m model.convert", description=__doc__.partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--out")
    given = parser.parse_args(words)
    try:
        print(f"wrote {convert_run(**vars(given))}: pos.layout={given.layout}; it can be measured and started from")
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
