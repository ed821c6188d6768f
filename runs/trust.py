"""A run folder may be a stranger's: what its config.yaml may have read, and what a run may say of who trained it."""

import contextlib
import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from data import DataConfig, used_before
from model.safety import printable

SECRET_NAME = r"(?i:(?:api|access|secret|private)[_-]?key(?:_id)?|secret|token|passw(?:or)?d|credentials?|signature)"
SECRETS = (
    re.compile(rf"(?P<before>{SECRET_NAME}[\"']?\s*[=:]\s*)[^\s&]+"),  # its name and its value, also in a URL
    re.compile(r"(?P<before>://)[^/\s@]+(?=@)"),  # user and password
    re.compile(r"(?P<before>\b)(?:(?:hf|gh[opsur]|github_pat|wandb_v1)_\w{20,}|sk-[\w-]{20,}|AKIA\w{16})"),
)


def check_source(run: Path, data: DataConfig, trust: bool, cache_setting: str) -> None:
    """Raise ValueError where reading a run's corpus would be following a stranger's word.

    A config.yaml can name any file of this machine, or of the network. So what it names is read where this user has
    read it before, by the token files in data.cache; where it lies in the run folder; for the standard library; and
    with trust. cache_setting: the command's setting for data.cache.
    """
    if trust or data.kind == "stdlib" or used_before(data) or (data.kind != "hub" and _inside(run, data.path)):
        return
    (path,) = redacted([str(data.path)])
    source = f"{path} of the Hugging Face hub" if data.kind == "hub" else f"the files {path}"
    raise ValueError(
        f"{run}: its config.yaml names {source} as its data, and nothing in {data.cache} says that you have used them "
        f"before. trust=true reads them, if you trust whoever made this folder; {cache_setting}=<folder> says where "
        "their token files are, if not there"
    )


def _inside(run: Path, paths: object) -> bool:
    """Whether files, or patterns, are of this folder only; links that lead out of it are refused before."""
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, Sequence) or not all(isinstance(path, str) for path in paths):
        return False
    for path in paths:
        place = Path(*takewhile(lambda part: not glob.has_magic(part), Path(path).expanduser().parts))
        if ".." in Path(path).parts or not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(run)):
            return False
    return True


def redacted(words: Sequence[str]) -> list[str]:
    """A command line without what looks like a secret, or is one by the name of an environment variable."""
    named = re.compile(f"{SECRET_NAME}$")
    secrets = [value for name, value in os.environ.items() if named.search(name) and len(value) >= 8]
    clean = []
    for word in words:
        for secret in secrets:
            word = word.replace(secret, "***")
        for pattern in SECRETS:
            word = pattern.sub(r"\g<before>***", word)
        clean.append(printable(word))
    return clean


@contextlib.contextmanager
def redacted_argv() -> Iterator[None]:
    """Around what looks up the command line by itself."""
    given, sys.argv = sys.argv, redacted(sys.argv)
    try:
        yield
    finally:
        sys.argv = given
