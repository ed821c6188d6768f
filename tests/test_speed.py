"""What a run says about its own speed."""

import json

import pytest
import torch

import speed
from tests.trained import TINY, run


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_mfu_is_three_forward_passes_over_the_peak(corpus, tmp_path):
    trainer = run(tmp_path / "known", *TINY, *corpus, "train.peak_flops=1e9")
    for row in rows(tmp_path / "known"):
        if "speed/mfu" in row:
            # one layer of 2 heads of 8 (width 16), 320 padded ids, 16 tokens; a multiply-add is two operations
            forward = 2 * (12 * 16 * 16 + 320 * 16) + 4 * 16 * 16
            assert row["speed/mfu"] == pytest.approx(row["speed/tokens_per_second"] * 3 * forward / 1e9)
    assert trainer.flops == 3 * forward
    run(tmp_path / "unknown", *TINY, *corpus)
    assert next(row["speed/mfu"] for row in rows(tmp_path / "unknown") if "speed/mfu" in row) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A1000 Laptop GPU", None),
    ],
)
def test_peaks_are_found_by_whole_words(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert speed.peak_flops(torch.device("cuda"), None) == peak
    assert speed.peak_flops(torch.device("cuda"), 1e12) == 1e12
    assert speed.peak_flops(torch.device("cpu"), None) is None


def test_the_first_step_is_timed_once(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus)
    first = [row for row in rows(tmp_path) if "speed/seconds_to_first_step" in row]
    assert len(first) == 1
    assert first[0]["step"] == 1
    assert 0 < first[0]["speed/seconds_to_first_step"] < 3600


def test_a_profile_holds_the_costliest_operators_of_three_steps(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus, "profile=true", "train.max_steps=6")
    table = (tmp_path / "profile.txt").read_text()
    assert len([line for line in table.splitlines() if "aten::" in line or "Optimizer" in line]) <= 10
    assert "aten::" in table
    events = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    assert len({event["name"] for event in events if event["name"].startswith("ProfilerStep#")}) == 3
    with pytest.raises(ValueError, match="max_steps=4"):
        run(tmp_path / "short", *TINY, *corpus, "profile=true", "train.max_steps=4")
