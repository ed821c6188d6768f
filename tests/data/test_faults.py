"""A full disk, a cache that is none, and preparations that are killed: real processes, real signals, real limits."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import data
from data import DataConfig, prepare
from tests.data.toys import BYTES, Hooked, give, silent, some_documents, texts_of, toy
from tests.data.written import write

REPOSITORY = Path(data.__file__).parents[1]


def python(code, *arguments):
    """A new process that imports from the checkout; returns what it says, which is JSON."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FULL = """
import json, os, resource, sys
from pathlib import Path
from data import DataConfig, get_tokenizer, prepare

root, said = Path(sys.argv[1]), []
corpora = {
    "ids": dict(kind="files", path=str(root / "long" / "*.txt")),
    "borders": dict(kind="files", path=str(root / "short.jsonl")),
    "description": dict(kind="files", path=[str(root / "a.txt"), *[str(root / "b.txt")] * 1000]),
    "bin": dict(kind="bin", path=str(root / "bin")),
}
for name, settings in corpora.items():
    for limit in map(int, sys.argv[2:]):
        config = DataConfig("mine", cache=str(root / "cache" / name), **settings)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            prepare(config, get_tokenizer("bytes"), lambda message: None)
            error = None
        except OSError as raised:
            error = str(raised)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        said.append([name, limit, error, [path.name for path in Path(config.cache).iterdir()]])
print(json.dumps(said))
"""


def test_a_disk_that_fills_up(tmp_path):
    for i in range(4):
        write(tmp_path / "long" / f"{i}.txt", f"{i} some words" * 5000)
    write(tmp_path / "short.jsonl", '{"text": "a"}\n' * 3000 + '{"text": "b"}')
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.txt", "two")
    for split in ("train", "val"):
        write(tmp_path / "bin" / f"{split}.bin", b"a\0\0\1" * 1000)
    # nothing fits; some of the ids; 12 KB of ids, but not the 24 KB of their borders, nor a description of 1001 paths
    said = python(FULL, tmp_path, 0, 1, 7000, 23000)
    assert len(said) == 16
    fitting = [(name, limit) for name, limit, error, _ in said if error is None]
    assert fitting == [("bin", 23000)]
    for name, limit, error, left in said:
        if (name, limit) not in fitting:
            assert error.startswith(f"data.cache={tmp_path / 'cache' / name}: could not write token files into")
            assert os.strerror(errno.EFBIG) in error
            assert "choose another folder with data.cache=" in error
            assert left == []


@pytest.mark.parametrize("cache", ["file", "file/within", "/proc", "/dev/null", "/dev/full/x"])
def test_a_cache_that_cannot_be_written_to(monkeypatch, tmp_path, cache):
    (tmp_path / "file").write_text("not a folder")
    give(monkeypatch, some_documents(30))
    place = str(tmp_path / cache)  # an absolute one stays as it is
    with pytest.raises(OSError, match=rf"data\.cache={place}: could not write token files .*choose another folder"):
        prepare(DataConfig("toy", "hub", "owner/toy", cache=place), BYTES, silent)


def test_a_home_that_is_not_there(monkeypatch):
    config = DataConfig("toy", "hub", "owner/toy", cache="~nobody_of_this_name/cache")
    with pytest.raises(ValueError, match=r"data\.cache=~nobody_of_this_name/cache: .*choose another folder"):
        prepare(config, BYTES, silent)
    assert not Path("~nobody_of_this_name").exists()


def test_a_cache_that_is_removed_meanwhile(monkeypatch, tmp_path):
    give(monkeypatch, some_documents(600))
    with pytest.raises(OSError, match=r"data\.cache=.*could not write token files .*No such file"):
        prepare(toy(tmp_path), Hooked(lambda: shutil.rmtree(tmp_path / "cache")), silent)
    assert len(prepare(toy(tmp_path), BYTES, silent).train)


def test_text_that_changes_while_it_is_read(tmp_path):
    paths = [write(tmp_path / f"{i}.txt", f"{i} text") for i in range(600)]
    config = DataConfig("mine", "files", paths, cache=str(tmp_path / "cache"))
    for change in (lambda: write(tmp_path / "1.txt", "1 more text"), (tmp_path / "2.txt").unlink):
        with pytest.raises(ValueError, match="changed while it was read; start again"):
            prepare(config, Hooked(change), silent)
        assert list((tmp_path / "cache").iterdir()) == []


KILLED = """
import json, os, random, signal, sys, threading, time
from pathlib import Path
from tqdm import tqdm
from data import DataConfig, get_tokenizer, prepare

tqdm.set_lock(threading.RLock())  # its own is shared with forks, who may be killed while they hold it

root, times = Path(sys.argv[1]), int(sys.argv[2])
tokenizer = get_tokenizer("bytes")

def prepared(cache):
    config = DataConfig("mine", "files", str(root / "text.jsonl"), cache=str(root / cache))
    return prepare(config, tokenizer, lambda message: None)

def content(folder):
    return {path.name: path.read_bytes().replace(folder.parent.name.encode(), b"") for path in folder.iterdir()}

began = time.perf_counter()
undisturbed = prepared("undisturbed")
took, left, rng = time.perf_counter() - began, [], random.Random(0)
for i in range(times):
    child = os.fork()
    if child == 0:
        prepared(f"killed{i}")
        os._exit(0)
    time.sleep(took * rng.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cache = root / f"killed{i}"
    there = sorted(path.name[:5] for path in cache.iterdir()) if cache.exists() else []
    found = prepared(cache.name)
    again = content(found.folder) == content(undisturbed.folder)
    left.append([there, again, [path.name for path in cache.iterdir()] == [found.folder.name]])
print(json.dumps(left))
"""


def test_preparations_killed_at_random_moments(tmp_path):
    write(tmp_path / "text.jsonl", "".join(f'{{"text": "{i} {"some words " * 30}"}}\n' for i in range(4000)))
    said = python(KILLED, tmp_path, 20)
    assert len(said) == 20
    assert sum(there == [".mine"] for there, *_ in said) >= 10  # of most there was something left
    for _, same, alone in said:
        assert same
        assert alone  # and that is removed


WAITING = """
import sys
import data.tokens
from data import DataConfig, get_tokenizer, prepare

def documents(config):
    print("reading", flush=True)
    sys.stdin.readline()
    yield from ((None, [f"document {i}"]) for i in range(600))

data.tokens.documents = documents
config = DataConfig("toy", "hub", "owner/toy", cache=sys.argv[1], val_fraction=float(sys.argv[2]))
print(prepare(config, get_tokenizer("bytes"), lambda message: None).folder)
"""


def test_only_what_no_process_fills_is_removed(monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    documents = [f"document {i}" for i in range(600)]
    give(monkeypatch, documents)

    def start(fraction=0.05):
        command = [sys.executable, "-c", WAITING, str(cache), str(fraction)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes)
        assert process.stdout.readline() == "reading\n"
        return process

    alive, killed, stopped, otherwise = (start(fraction) for fraction in (0.05, 0.05, 0.05, 0.5))
    try:
        assert len(list(cache.iterdir())) == 4
        killed.send_signal(signal.SIGKILL)
        otherwise.send_signal(signal.SIGKILL)
        killed.wait()
        otherwise.wait()
        stopped.send_signal(signal.SIGSTOP)  # it does nothing, but lives
        others = {"mine", ".mine-bytes-0123", "toy-bytes-old", ".toy-gpt2-0123456789abcdef-x-" + "0" * 32}
        for name in others:
            (cache / name).mkdir()

        found = prepare(toy(tmp_path), BYTES, silent)
        left = {path.name for path in cache.iterdir()} - others - {found.folder.name}
        assert len(left) == 2
        assert others < {path.name for path in cache.iterdir()}
        stopped.send_signal(signal.SIGCONT)
        for process in (alive, stopped):
            said, _ = process.communicate("go\n", timeout=60)
            assert said.strip() == str(found.folder)
    finally:
        for process in (alive, killed, stopped, otherwise):
            process.kill()
            process.wait()
    assert {path.name for path in cache.iterdir()} == others | {found.folder.name}
    assert sorted(texts_of(found, "train") + texts_of(found, "val")) == sorted(documents)


def test_without_locks_nothing_is_taken_for_left(monkeypatch, tmp_path):
    give(monkeypatch, some_documents(600))
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # as if killed
    with pytest.raises(KeyError):
        prepare(toy(tmp_path), Hooked(lambda: {}["killed"]), silent)
    monkeypatch.undo()
    give(monkeypatch, some_documents(600))
    (left,) = (tmp_path / "cache").iterdir()

    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    found = prepare(toy(tmp_path), BYTES, silent)
    assert len(texts_of(found, "train"))
    assert {*(tmp_path / "cache").iterdir()} == {left, found.folder}


def test_a_folder_taken_for_a_leftover_at_its_birth(monkeypatch, tmp_path):
    # between its making and its lock another process may hold it, or have removed it
    flock, made = fcntl.flock, []

    def first_held_then_gone(lock, operation):
        (folder,) = [path for path in (tmp_path / "cache").iterdir() if path not in made]
        made.append(folder)
        if len(made) == 1:
            raise BlockingIOError
        if len(made) == 2:
            shutil.rmtree(folder)
            made.remove(folder)
            made.append(None)
        return flock(lock, operation)

    give(monkeypatch, some_documents(30))
    monkeypatch.setattr(fcntl, "flock", first_held_then_gone)
    found = prepare(toy(tmp_path), BYTES, silent)
    assert len(made) == 3
    assert {*(tmp_path / "cache").iterdir()} == {found.folder, made[0]}
