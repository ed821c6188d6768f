"""The commands, links and sizes of README.md and docs/: what a reader pastes exists."""

import argparse
import json
import math
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

import eval  # noqa: F401 (this and the next register the schemas that the configuration files name)
import train  # noqa: F401
from measure.tables import usable

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
# Up to the end of a line that no backslash continues, or of the code in a sentence, which may go on in the next line.
HYDRA = re.compile(r"(?:python|torchrun\s[^`\n]*?)\s+(train|eval)\.py\b((?:\\\n|[^`\n])*)(\n[^`\n]+`)?")
MODULE = re.compile(r"python -m (model\.\w+)((?:\\\n|[^`\n])*)")


def text_of(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def code_of(page: str) -> str:
    """A page without what is still to be filled in."""
    return re.sub(r"\{\{.*?\}\}", "", text_of(page), flags=re.DOTALL)


def split_words(command: str) -> list[str]:
    """As a shell does, without comments; a placeholder such as <run> is a word."""
    return shlex.split(re.sub(r"<[^<>]*>", "placeholder", command).replace("\\\n", " "), comments=True)


def hydra_commands() -> list[tuple[str, str, tuple[str, ...]]]:
    """(page, train or eval, words) of every command."""
    found = []
    for page in PAGES:
        for name, rest, next_line in HYDRA.findall(code_of(page)):
            # In a sentence an odd number of quotation marks shows that the code goes on in the next line.
            whole = rest + next_line.rstrip("`") if rest.count("'") % 2 else rest
            found.append((page, name, tuple(split_words(whole))))
    return list(dict.fromkeys(found))


def module_commands() -> list[tuple[str, str, tuple[str, ...]]]:
    found = [(page, name, tuple(split_words(rest))) for page in PAGES for name, rest in MODULE.findall(code_of(page))]
    return list(dict.fromkeys(one for one in found if one[2]))  # without words it is a name in a sentence


def single_values(words: list[str]) -> list[str]:
    """Each swept setting with its first value."""
    singles = []
    for override in OverridesParser.create().parse_overrides(words):
        value = override.input_line
        if override.is_interval_sweep():
            value = f"{override.get_key_element()}={override.value().start}"
        elif override.is_sweep_override():
            value = f"{override.get_key_element()}={first_of(override)}"
        singles.append(value)
    return singles


def first_of(override: Override) -> str:
    return next(override.sweep_string_iterator())


@pytest.mark.parametrize(("page", "name", "words"), hydra_commands())
def test_hydra_composes_every_command(page, name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [word for word in words if not word.startswith("-")]
    folders = [word for word in settings if "=" not in word]
    assert name == "eval" or not folders, f"{folders}: train.py takes settings only"
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        compose(name, single_values([word for word in settings if word not in folders]))


class AcceptedError(Exception):
    """argparse has accepted the words."""


@pytest.mark.parametrize(("page", "module", "words"), module_commands())
@pytest.mark.filterwarnings("ignore::RuntimeWarning:runpy")
def test_argparse_accepts_every_command(page, module, words, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def stop(parser, given=None, namespace=None):
        parse(parser, given, namespace)
        raise AcceptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(AcceptedError):
        runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text_of(page)) if "://" not in link]
    missing = [link for link in links if not (PAGES[page].parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_filled_in(page):
    assert re.findall(r"\{\{[^}]*", text_of(page)) == []


def test_the_front_page_is_short_and_links_to_all_others():
    assert len(PAGES["README.md"].read_bytes()) <= 10_000
    others = [page for page in PAGES if page != "README.md"]
    assert [page for page in others if f"({page})" not in text_of("README.md")] == []


def test_the_commands_are_found():
    commands = [" ".join((name, *words)) for _, name, words in hydra_commands()]
    assert {"train pos=rope", "eval runs=outputs/*_256_seed0", "train -m experiment=train_short_test_long"} <= {
        *commands
    }
    assert {module for _, module, _ in module_commands()} == {"model.rope_report", "model.convert", "model.hf"}


# A comment before a table says which numbers of which file it shows: <!-- study/stdlib.json sliding perplexity -->
TABLE = re.compile(r"<!-- (\S+\.json) (\w+) (\w+) -->\n\n((?:\|.*\n)+)")
TABLES = [(page, *found) for page in PAGES for found in TABLE.findall(text_of(page))]


def in_brackets(pair: dict | None, change, sign: str = "") -> str:
    if pair is None:
        return "–"
    value, low, high = (change(pair[key]) for key in ("difference", "low", "high"))
    places = max(0, 1 - math.floor(math.log10((high - low) / 2)))
    return f"{value:{sign}.{places}f} [{low:.{places}f}, {high:.{places}f}]".replace("-", "−")


def cell_of(group: dict, length: int, kind: str, paired: list[dict]) -> str:
    row = next(row for row in group["rows"] if row["length"] == length)
    if row["nll"] is None:
        return "–"
    if kind == "perplexity":
        error = row["stderr"] * row["perplexity"]
        places = max(0, 1 - math.floor(math.log10(error)))
        return f"{row['perplexity']:.{places}f} ± {error:.{places}f}"
    if kind == "ratio":
        return in_brackets(row.get("against_train_length"), math.exp)
    names = ("protocol", "model", "length")
    wanted = (group["protocol"], group["model"], length)
    return in_brackets(next((p for p in paired if tuple(p[key] for key in names) == wanted), None), float, "+")


@pytest.mark.parametrize(("page", "path", "protocol", "kind", "table"), [t for t in TABLES if t[3] != "match"], ids=str)
def test_tables_are_those_of_the_measurements_in_docs(page, path, protocol, kind, table):
    found = json.loads((ROOT / "docs" / path).read_text(encoding="utf-8"))
    groups = {
        re.sub(r"^.* |^[a-z]+_|_\d+$", "", one["model"]): one for one in found["groups"] if one["protocol"] == protocol
    }
    head, _, *lines = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines())
    lengths = {at: int(name) for at, name in enumerate(head) if name.isdigit()}
    assert len(lines) >= 3
    assert len(lengths) >= 4
    for line in lines:
        group = groups[line[0].strip("`")]
        assert [line[at] for at in lengths] == [cell_of(group, n, kind, found["paired"]) for n in lengths.values()]
        assert head[-1] != "usable" or line[-1] == usable(group["usable_length"])


@pytest.mark.parametrize(("page", "path", "protocol", "kind", "table"), [t for t in TABLES if t[3] == "match"], ids=str)
def test_tables_of_tasks_are_those_of_the_measurements_in_docs(page, path, protocol, kind, table):
    """A line per scheme, and one of its seeds that are right in the first range: mean [lowest, highest seed]; of one
    seed its own interval."""
    results = json.loads((ROOT / "docs" / path).read_text(encoding="utf-8"))["results"]
    head, _, *lines = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines())
    for line in lines:
        found = [one for one in results if f"`{one['pos']['name']}`" in line[0]]
        if "right" in line[0]:
            found = [one for one in found if one["rows"][0]["exact_match"] == 1]
        assert found
        assert line[1] == str(len(found))
        for at, span in list(enumerate(head))[2:]:
            rows = [row for one in found for row in one["rows"] if row["range"] == span]
            values = [row["exact_match"] for row in rows]
            ends = (min(values), max(values)) if len(values) > 1 else (rows[0]["low"], rows[0]["high"])
            value, low, high = (f"{x:.4f}".rstrip("0").rstrip(".") for x in (sum(values) / len(values), *ends))
            assert line[at] == f"{value} [{low}, {high}]"


def test_the_learning_rates_are_those_measured():
    runs = json.loads((ROOT / "docs/study/learning_rates.json").read_text(encoding="utf-8"))["runs"]
    lines = [line.replace("**", "") for line in text_of("docs/study.md").splitlines()]
    for one in runs:
        rows = [line for line in lines if line.startswith(f"| `{one['pos']}` |")]
        assert any(f" {one['nll']:.3f} |" in row for row in rows), one


def test_the_measurements_in_docs_are_shown():
    paths = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("study/*.json")}
    assert paths <= {path for _, path, *_ in TABLES} | {"study/learning_rates.json"}


def test_bash_reads_the_slurm_script():
    subprocess.run(["bash", "-n", str(ROOT / "docs" / "slurm.sh")], check=True)
