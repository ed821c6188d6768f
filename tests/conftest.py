"""No test may reach the network or a wandb account, or write outside its own folder."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["NETRC"] = os.devnull
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: threads that wait for each other cost more than they bring
for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
    os.environ.pop(name, None)

import pytest  # noqa: E402 (after the environment: libraries read it on import)


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """A home of its own for every test: caches and credentials live there."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder
