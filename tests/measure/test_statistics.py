"""Errors against closed forms, plain loops and simulations."""

import math

import numpy as np
import pytest
import torch

from measure.statistics import (
    difference_and_error,
    exp,
    finite,
    interval,
    mean_and_spread,
    ratio_and_error,
    summed,
    t_quantile,
)


def test_two_windows_of_unequal_size_are_weighted_by_their_tokens():
    """A mean of window means would say 1.5."""
    nll, stderr = ratio_and_error(np.array([9.0, 2.0]), np.array([9, 1]))
    assert nll == pytest.approx(1.1)
    # residuals 9 - 9.9 and 2 - 1.1: ±0.9, so sqrt(2 · (0.81 + 0.81)) / 10
    assert stderr == pytest.approx(math.sqrt(2 * 1.62) / 10)
    assert ratio_and_error(np.array([3.0]), np.array([2])) == (1.5, None)


def test_equal_windows_have_the_textbook_error():
    rng = np.random.default_rng(0)
    losses = rng.normal(8.0, 1.0, 50)
    nll, stderr = ratio_and_error(losses, np.full(50, 4))
    assert nll == pytest.approx(losses.mean() / 4)
    assert stderr == pytest.approx(losses.std(ddof=1) / math.sqrt(50) / 4)


def test_clustered_windows_count_as_one():
    losses, counts = np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([1, 1, 2, 2, 4])
    merged = ratio_and_error(np.array([3.0, 12.0, 16.0]), np.array([2, 4, 4]))
    assert ratio_and_error(losses, counts, np.array([7, 7, 3, 3, 9])) == pytest.approx(merged)
    assert ratio_and_error(losses, counts, np.zeros(5, dtype=int)) == (3.1, None)
    assert summed(losses, np.array([5, 1, 5, 1, 5])).tolist() == [10.0, 21.0]


def test_a_paired_difference_is_the_mean_of_differences_with_its_textbook_error():
    rng = np.random.default_rng(0)
    a, b = rng.normal(8.0, 3.0, 40), rng.normal(7.0, 3.0, 40)
    counts = np.full(40, 4)
    difference, error = difference_and_error((a, counts), (b, counts))
    assert difference == pytest.approx((a - b).mean() / 4)
    assert error == pytest.approx((a - b).std(ddof=1) / math.sqrt(40) / 4)


def test_pairing_takes_out_what_two_measurements_share():
    """Documents of very different difficulty and size, and a small constant gain: unpaired, it would drown."""
    rng = np.random.default_rng(1)
    counts = rng.integers(10, 200, 60)
    b = counts * rng.normal(2.0, 1.0, 60)
    a = b + 0.05 * counts + rng.normal(0, 0.01, 60) * counts
    difference, error = difference_and_error((a, counts), (b, counts))
    unpaired = math.hypot(ratio_and_error(a, counts)[1], ratio_and_error(b, counts)[1])
    assert difference == pytest.approx(0.05, abs=0.01)
    assert error < 0.05 * unpaired


def test_intervals_hold_their_95_percent():
    """Simulated documents: the interval contains the true difference as often as it says (unequal sizes included)."""
    rng, held, n = np.random.default_rng(2), 0, 4000
    for _ in range(n):
        counts = rng.integers(50, 150, 12)
        shared = rng.normal(0, 2.0, 12)
        a = counts * (shared + 0.3 + rng.normal(0, 0.2, 12))
        b = counts * (shared + rng.normal(0, 0.2, 12))
        low, high = interval(*difference_and_error((a, counts), (b, counts)), 12)
        held += low <= 0.3 <= high
    assert held / n == pytest.approx(0.945, abs=0.015)


def test_quantiles_of_students_t():
    table = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}  # any statistics book
    for freedom, expected in table.items():
        assert t_quantile(freedom) == pytest.approx(expected, rel=0.01 if freedom < 4 else 1e-3)


def test_no_interval_from_fewer_than_three_clusters():
    assert interval(1.0, 0.1, 2) is None
    assert interval(1.0, None, 30) is None
    low, high = interval(1.0, 0.1, 11)
    assert (low, high) == pytest.approx((1 - 0.2228, 1 + 0.2228), abs=1e-4)


def test_spread_over_seeds():
    assert mean_and_spread([3.0]) == (3.0, None)
    mean, spread = mean_and_spread([1.0, 2.0, 6.0])
    assert (mean, spread) == pytest.approx((3.0, torch.tensor([1.0, 2.0, 6.0]).std().item()))


def test_what_json_cannot_hold():
    assert exp(1000.0) == math.inf
    assert math.isnan(exp(math.nan))
    assert finite({"a": [math.inf, {"b": math.nan}], "c": "x", "d": 1}) == {"a": [None, {"b": None}], "c": "x", "d": 1}
