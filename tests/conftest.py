"""No test may reach the network or a wandb account, or write outside its own folder."""

import os
import tempfile

CACHE = tempfile.TemporaryDirectory()  # of `datasets`, which leaves lock files there
os.environ["HF_DATASETS_CACHE"] = CACHE.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["NETRC"] = os.devnull
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: threads that wait for each other cost more than they bring
for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
    os.environ.pop(name, None)

import json  # noqa: E402 (after the environment: libraries read it on import)

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Forty small documents, and the settings that read them."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [{"text": f"document {i}: " + " ".join(str(i * j % 97) for j in range(40))} for i in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "cache").mkdir()
    return [f"data.path={folder / 'text.jsonl'}", f"data.cache={folder / 'cache'}"]


@pytest.fixture(autouse=True)
def home(corpus, tmp_path_factory, monkeypatch):
    """A home of its own for every test, whose cache is that of the corpus, so that its runs are the user's own."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    (folder / ".cache").mkdir()
    (folder / ".cache" / "ropewalk").symlink_to(corpus[1].partition("=")[2])
    return folder


@pytest.fixture(scope="session")
def two_runs(corpus, tmp_path_factory):
    """Folders `learned` and `rope`, trained. Tests leave them as they are, but for what a measurement writes."""
    from tests.trained import TINY, run

    root = tmp_path_factory.mktemp("runs") / "outputs"
    for pos in ("learned", "rope"):
        run(root / pos, *TINY, *corpus, f"pos={pos}")
    return root
