"""A run folder may be a stranger's: what is checked before anything in it is read, or written.

Nothing in a run folder is ever executed. Here is the rest: it does not lead out of itself, none of its files takes more
memory than it has bytes, and no text in it reaches a terminal as anything but text.
"""

import os
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_TEXT = 1 << 20  # characters of a config.yaml, which takes seconds to read
# All that a training state of plain values and tensors names; what else torch would build takes memory by a number.
NAMES_IN_STATE = re.compile(r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage")
# Terminals obey the first, and are written from right to left by the second.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u202a-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """For a terminal: control characters, other than ends of lines and tabs, by their escapes."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def check_folder(run: str | Path, to_write: bool = False) -> None:
    """Raise ValueError, naming it, for whatever in a run folder leads out of it, or is no file or folder.

    The folder itself may be a link. to_write: as files are also appended to, none may have a second name elsewhere.
    """
    root, linked = Path(os.path.realpath(run)), {}
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in (*folders, *files)):
            try:
                found = path.lstat()
            except FileNotFoundError:  # the run is being trained, and its files are renamed
                continue
            if stat.S_ISLNK(found.st_mode):
                if not Path(target := os.path.realpath(path)).is_relative_to(root):
                    _refuse(run, path.relative_to(root), f"a link that leads out of it, to {target}")
            elif stat.S_ISREG(found.st_mode):
                linked.setdefault((found.st_dev, found.st_ino), []).append((found.st_nlink, path))
            elif not stat.S_ISDIR(found.st_mode):
                _refuse(run, path.relative_to(root), "no file and no folder")
    for names in linked.values():
        links, path = names[0]
        if to_write and links > len(names):  # else the other names are in this folder too: a killed process' file
            _refuse(run, path.relative_to(root), "a hard link, and to write to it would change a file elsewhere")


def _refuse(run: str | Path, name: Path, what: str) -> None:
    way_out = "if you made it yourself, put a copy of the file in its place; else do not trust this folder"
    raise ValueError(printable(f"{run}: {name} is {what}; {way_out}"))


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """A file in UTF-8. ValueError where it is something else, or longer than `most` characters."""
    with open(path, encoding="utf-8") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"it is longer than {most} characters")
    return text


def read_yaml_text(path: Path) -> str:
    """The text of a config.yaml, to be parsed. ValueError where it is none that this program wrote.

    It has no aliases, by which a few lines can stand for more than fits into the memory, no tags, which name types, no
    numbers and nesting that take minutes to read, and no control characters.
    """
    import yaml

    opening = yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken
    opening |= yaml.BlockSequenceStartToken | yaml.BlockMappingStartToken
    closing = yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken | yaml.BlockEndToken
    text, depth = read_text(path), 0
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            depth += isinstance(token, opening) - isinstance(token, closing)
            value = token.value if isinstance(token, yaml.ScalarToken) else ""
            if isinstance(token, yaml.AliasToken | yaml.TagToken):
                found = "an alias or a tag"
            elif CONTROL.search(value):
                found = "a control character"
            elif re.fullmatch(r"[-+\d_:.]{4000,}", value):
                found = f"a number of {len(value)} digits"
            elif depth > 50:
                found = "more than 50 values in one another"
            else:
                continue
            raise ValueError(f"it has {found} in line {token.start_mark.line + 1}")
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {' '.join(str(error).split())}") from error
    return text


def check_header(config: Any, file: Any) -> None:
    """Whether a model's width, vocabulary and depth are those of a file (safetensors.safe_open's) that is to hold it.

    To be asked before a GPTConfig is made of `config`, which computes with them. Raises ValueError, or TypeError for
    what is no description at all.
    """
    rows, width = file.get_slice("embedding.weight").get_shape()
    sizes = [config[key] for key in ("vocab_size", "n_layer", "n_head", "head_dim")]
    if not all(type(size) is int for size in sizes):
        raise TypeError("its description has sizes that are no whole numbers")
    vocab_size, n_layer, n_head, head_dim = sizes
    if not 0 < vocab_size <= rows or n_head * head_dim != width or not 0 < n_layer < len(file.keys()):
        raise ValueError(f"it cannot hold the model it describes: {n_layer} layers, {n_head} heads of {head_dim}")


def check_tensors(expected: dict[str, Tensor], n_layer: int, file: Any) -> None:
    """ValueError unless a file (safetensors.safe_open's) has just the tensors of a model, in their shapes.

    To be asked before memory is taken for them. expected: of the same model with a single layer, on the device meta.
    """
    names = set(file.keys())
    layers, others = {}, {}
    for name, tensor in expected.items():
        (layers if name.startswith("blocks.0.") else others)[name] = list(tensor.shape)
    if len(names) != len(others) + n_layer * len(layers):
        raise ValueError(f"it has {len(names)} tensors, not {len(others) + n_layer * len(layers)}")
    for layer in range(n_layer):
        others |= {name.replace("blocks.0.", f"blocks.{layer}.", 1): shape for name, shape in layers.items()}
    for name, shape in others.items():
        if name not in names or (found := file.get_slice(name).get_shape()) != shape:
            raise ValueError(f"its {name} is {found if name in names else 'missing'}, not {shape}")


def load_pickled(path: Path, device: str | torch.device) -> dict:
    """torch.load of plain values and tensors: nothing is run, and no more memory taken than the file has bytes.

    Raises ValueError, or whatever damage happens to trigger in zipfile, pickletools and torch.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("its parts are larger than itself")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                for name in _named(archive.read(entry)):
                    if not NAMES_IN_STATE.fullmatch(name):
                        raise ValueError(f"it names {name}, which is no plain value and no tensor")
    state = torch.load(path, map_location=device, weights_only=True)
    size = 0  # what copying it would take: one number can stand for many, and one list be in many others
    for value in _parts(state):
        size += value.numel() * value.element_size() if isinstance(value, Tensor) else 1
        if size > path.stat().st_size:
            raise ValueError("its parts are larger than itself")
    return state


def _named(pickled: bytes) -> Iterator[str]:
    """What a pickle would import: `module name`. The opcodes are read, and not followed."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            yield argument
        elif opcode.name in ("INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):  # other ways, which torch does not go
            yield opcode.name


def _parts(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _parts(inner)
