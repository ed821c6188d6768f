import datasets
import pytest


@pytest.fixture(autouse=True)
def _datasets_stays_here(monkeypatch, tmp_path):
    # otherwise `datasets` leaves lock files in the home directory and asks the network to count each use
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
