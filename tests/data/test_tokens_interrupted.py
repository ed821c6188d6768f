"""Token files whose making is interrupted, killed or overtaken."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import data.tokens
from data import prepare
from tests.data.toys import BYTES, Hooked, forbid_reading, give, raising, silent, some_documents, texts_of, toy


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_an_interruption_leaves_nothing(monkeypatch, tmp_path, error):
    documents = some_documents(600)
    give(monkeypatch, documents)
    with pytest.raises(type(error)):
        prepare(toy(tmp_path), Hooked(raising(error)), silent)
    assert list((tmp_path / "cache").iterdir()) == []
    found = prepare(toy(tmp_path), BYTES, silent)
    assert sorted(texts_of(found, "train") + texts_of(found, "val")) == sorted(documents)


def test_a_corpus_that_breaks_off_leaves_nothing(monkeypatch, tmp_path):
    documents = some_documents(600)

    def broken(config):
        yield from ((None, [text]) for text in documents[:400])
        raise ValueError("gone")

    monkeypatch.setattr(data.tokens, "documents", broken)
    with pytest.raises(ValueError, match="gone"):
        prepare(toy(tmp_path), BYTES, silent)
    assert list((tmp_path / "cache").iterdir()) == []
    give(monkeypatch, documents)
    found = prepare(toy(tmp_path), BYTES, silent)
    assert sorted(texts_of(found, "train") + texts_of(found, "val")) == sorted(documents)


@pytest.mark.parametrize("where", ["in the middle", "before the description", "before the renaming"])
def test_what_a_killed_process_leaves_is_not_read(monkeypatch, tmp_path, where):
    class Killed(BaseException):
        pass

    documents = some_documents(600)
    give(monkeypatch, documents)
    kill = raising(Killed())
    with monkeypatch.context() as dying:
        dying.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # who is killed does not clean up
        if where == "before the description":
            dying.setattr(Path, "write_text", kill)
        if where == "before the renaming":
            dying.setattr(Path, "rename", kill)
        with pytest.raises(Killed):
            prepare(toy(tmp_path), Hooked(kill) if where == "in the middle" else BYTES, silent)
    assert len(list((tmp_path / "cache").iterdir())) == 1  # there is something that could be mistaken
    found = prepare(toy(tmp_path), BYTES, silent)
    assert sorted(texts_of(found, "train") + texts_of(found, "val")) == sorted(documents)
    assert list((tmp_path / "cache").iterdir()) == [found.folder]  # and it is removed


def test_a_faster_preparation_is_kept(monkeypatch, tmp_path):
    give(monkeypatch, some_documents(300))
    faster = []
    tokenizer = Hooked(lambda: faster.append(prepare(toy(tmp_path), BYTES, silent)))
    slower = prepare(toy(tmp_path), tokenizer, silent)
    assert len(faster) == 1
    assert slower.folder == faster[0].folder
    assert slower.train.tolist() == faster[0].train.tolist()
    assert list((tmp_path / "cache").iterdir()) == [slower.folder]


def test_a_folder_that_cannot_be_renamed_is_an_error(monkeypatch, tmp_path):
    give(monkeypatch, some_documents(30))
    monkeypatch.setattr(Path, "rename", raising(PermissionError("not yours")))
    with pytest.raises(OSError, match=r"data\.cache=.*not yours.*choose another folder"):
        prepare(toy(tmp_path), BYTES, silent)
    assert list((tmp_path / "cache").iterdir()) == []


PROCESS = """
import sys
import data.tokens
from data import DataConfig, get_tokenizer, prepare

def documents(config):
    print("reading", flush=True)
    sys.stdin.readline()  # until the other reads, too
    yield from ((None, [f"document {i}"]) for i in range(600))

data.tokens.documents = documents
config = DataConfig("toy", "hub", "owner/toy", cache=sys.argv[1])
print(prepare(config, get_tokenizer("bytes"), lambda message: None).fingerprint)
"""


def test_two_processes_at_once(monkeypatch, tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path / "cache")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(data.__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": seed},  # of which the split must not depend
        )
        for seed in ("1", "2")
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["reading\n"] * 2
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.communicate(timeout=60)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    (folder,) = (tmp_path / "cache").iterdir()

    forbid_reading(monkeypatch)
    found = prepare(toy(tmp_path), BYTES, silent)
    assert found.folder == folder
    documents = [f"document {i}" for i in range(600)]
    assert sorted(texts_of(found, "train") + texts_of(found, "val")) == sorted(documents)
    give(monkeypatch, documents)
    assert said == [prepare(toy(tmp_path / "here"), BYTES, silent).fingerprint] * 2
