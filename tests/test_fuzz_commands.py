"""Anything on the command line, or in a run's config.yaml: a result, or one message that names the setting."""

import json
import re
import shutil
from pathlib import Path

import hydra
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import eval
import runs
import train
from runs import CONFIGS
from tests.fuzzing import Answer, examples, spellings, typable, typed, values
from tests.trained import TINY, composed, measure, run

SHORT = ["train.max_steps=2", "train.eval_every=2", "val.multiples=[1]"]
SCHEMAS = {"train": runs.TrainConfig, "eval": eval.EvalConfig}
MAINS = {  # as decorated in the modules, but for the place of configs/, which Hydra finds by the file that is run
    name: hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(module.main.__wrapped__)
    for name, module in (("train", train), ("eval", eval))
}


def command(name: str, words: list[str], folder: Path) -> Answer:
    def run_it():
        with runs.entry(SCHEMAS[name]):
            MAINS[name]()

    return typed(run_it, f"{name}.py", words, folder)


def keys_of(config: dict, prefix: str = "") -> list[str]:
    """Every setting there is, by walking the composed configuration."""
    found = []
    for key, value in config.items():
        found += [f"{prefix}{key}", *(keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
    return found


OF_HYDRA = ["hydra.run.dir", "hydra.sweep.dir", "hydra.job.name", "hydra.verbose", "hydra.job_logging", "hydra.nope"]
UNKNOWN = ["nope", "model.nope", "pos.nope", "train.lr.nope", "experiment"]
KEYS = {name: [*keys_of(OmegaConf.to_container(composed(name=name, schema=schema))), *OF_HYDRA, *UNKNOWN]
        for name, schema in SCHEMAS.items()}  # fmt: skip
KEYS["train"].remove("data.cache")  # wherever it says, a corpus would be prepared there anew
RAW = [
    "null",
    "true",
    "[]",
    "{}",
    "[1,2]",
    "{a:1}",
    "[[1]]",
    "[null]",
    "[nan]",
    "[-1]",
    "[1e308]",
    "[1e400]",
    "1,2",
    "''",
]
RAW += ["choice(1,2)", "${seed}", "${oc.env:HOME}", "${x}", "${name}", "[1,", "{a", "True", "range(1,3)", "[a", "'a b"]
quoted = spellings.map(eval.hydra_string)
written = st.sampled_from(RAW) | spellings | quoted


def words_of(name: str):
    """A setting as somebody types it, right or not."""
    forms = st.sampled_from(["{}={}"] * 6 + ["+{}={}", "++{}={}", "~{}", "{}"])
    words = st.builds(str.format, forms, st.sampled_from(KEYS[name]), written)
    # Settings that are right, but take their time.
    return words.filter(typable).filter(lambda word: not re.search(r"^\W*(train.max_steps|tokens)=\W*\d{3}", word))


def check(answer: Answer, words: list[str], given: str, folder: Path) -> None:
    """One message that names the setting, or one that it stands in, and nothing half-made; or else a result."""
    if answer.status == 0:
        return
    said = answer.error.replace(repr([*words, given]), "")  # Hydra's own line of all the words
    assert "Traceback" not in said
    assert "site-packages" not in said
    assert len(said) < 3000 + 3 * len(given)
    key = given.lstrip("+~").partition("=")[0]
    names = [key, key.rpartition(".")[2], key.partition(".")[0]]
    assert any(name in said for name in names), said
    assert {path.name for path in folder.rglob("*") if path.is_file()} <= {"train.log"}


def cache_of(words: list[str]) -> str:
    """eval.py's setting for the folder in which it finds that this user has read the text before."""
    return next(word.removeprefix("data.") for word in words if word.startswith("data.cache="))


@pytest.fixture(scope="module")
def tiny(corpus, tmp_path_factory):
    """The words of a run that takes a moment, a folder with one, and what is measured of it."""
    words = [*TINY, *corpus, *SHORT]
    folder = tmp_path_factory.mktemp("a run") / "rope"
    run(folder, *words)
    whole = [f"runs='{folder}'", cache_of(words), "lengths=[8,16]", "max_targets=64", "by_position=false"]
    return words, folder, measure(*whole, "precision=fp32")[0]["rows"]


@examples(15)
@given(word=words_of("train"))
def test_training_is_a_run_or_one_message(word, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("typed")
    answer = command("train", [*tiny[0], word], folder)
    check(answer, tiny[0], word, folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("task", ["measure", "sample"])
@examples(15)
@given(word=words_of("eval"))
def test_evaluation_is_a_report_or_one_message(task, word, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("typed")
    words = [
        f"runs={eval.hydra_string(str(tiny[1]))}",
        "device=cpu",
        "precision=fp32",
        "wandb.mode=disabled",
        "tokens=3",
    ]
    words += [cache_of(tiny[0]), f"task={task}", "lengths=[8,16]", "max_targets=64"]
    answer = command("eval", [*words, word], folder)
    check(answer, words, word, folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("train", "seed=${x}", "Interpolation key 'x' not found"),
        ("train", "tokenizer=3", "in: "),
        ("train", "tokenizer=[null]", "in: "),
        ("train", "hydra.verbose=3", "in: "),
        ("train", "wandb.group=[1,", "wandb.group=[1,"),
        ("train", "resume=0", "resume=0: "),
        ("train", "init_from=0", "init_from=0: "),
        ("train", "val.multiples=[nan]", "val.multiples=[nan]"),
        ("train", "val.multiples=[inf]", "val.multiples=[inf]"),
        ("train", "seed=9223372036854775808", "seed=9223372036854775808: must be at least 0, and below 2^63"),
        ("train", "train.batch_size=1000000000000", "train.batch_size=1000000000000"),
        ("train", "train.batch_size=9223372036854775808", "train.batch_size=9223372036854775808"),
        ("train", "model.n_layer=1000000000", "model.n_layer=1000000000"),
        ("train", "model.head_dim=10000000", "model.head_dim=10000000"),
        ("train", "pos=shaw pos.max_distance=10000000000", "pos.max_distance"),
        ("train", "val.max_targets=0", "val.max_targets=0"),
        ("eval", "lengths=[1000000000]", "lengths=[1000000000]"),
        ("eval", "lengths=[99999999999999999999999]", "lengths"),
        ("eval", "task=sample tokens=1000000000000", "max_new_tokens=1000000000000"),
        ("eval", "task=sample tokens=1000000000", "GiB"),
        ("eval", "task=sample seed=9223372036854775808", "seed"),
        ("eval", "task=sample top_k=0 temperature=1", "top_k=0"),
        ("eval", "scaling=[inf]", "in: "),
    ],
)  # fmt: skip
def test_one_message_says_what_is_wrong(name, word, message, tiny, tmp_path, memory_of_16_gib):
    run_words = [f"runs={eval.hydra_string(str(tiny[1]))}", "device=cpu", "precision=fp32", cache_of(tiny[0])]
    words = [*(tiny[0] if name == "train" else run_words), *word.split()]
    answer = command(name, words, tmp_path)
    assert answer.status == 1
    assert "Traceback" not in answer.error
    assert message in answer.error.replace(repr(words), "")
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"train.log"}


@pytest.fixture
def memory_of_16_gib(monkeypatch):
    """What is larger is refused, by this program or by the system, and never tried."""
    import resource

    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}.get)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**34, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@examples(15)
@given(data=st.data())
def test_a_config_yaml_with_anything_in_it_is_the_same_run_or_named(data, tiny, tmp_path_factory):
    """A setting is replaced, taken out or made up; the weights, whose header has the model, stay."""
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(tiny[1], folder / "run")
    path = folder / "run" / "config.yaml"
    plain = yaml.safe_load(path.read_text())
    *parents, last = data.draw(st.sampled_from([*keys_of(plain), "nope", "model.nope", "provenance.nope"])).split(".")
    block = plain
    for parent in parents:
        block = block[parent]
    if data.draw(st.integers(0, 3)):
        block[last] = data.draw(values)
    else:
        block.pop(last, None)
    path.write_bytes(yaml.safe_dump(plain, allow_unicode=True).encode("utf-8", "surrogatepass"))
    words = [f"runs={eval.hydra_string(str(folder / 'run'))}", "device=cpu", "precision=fp32", "wandb.mode=disabled"]
    words.append(cache_of(tiny[0]))
    answer = command("eval", [*words, "lengths=[8,16]", "max_targets=64", "by_position=false"], folder)
    if answer.status:
        assert "Traceback" not in answer.error
        assert str(folder / "run") in answer.error.replace(repr(words)[1:-1], "") or "data." in answer.error
    elif parents != ["data"] and last not in ("data", "tokenizer"):
        rows = json.loads((folder / "run" / "extrapolation.json").read_text())["rows"]
        assert rows == tiny[2]
    shutil.rmtree(folder)
