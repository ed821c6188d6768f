"""Errors and intervals against closed forms, plain matrices and simulations."""

import math

import numpy as np
import pytest

from measure.statistics import ENOUGH_DOCUMENTS, estimate, exp, standard_error, t_quantile


def mean_and_error(losses, counts):
    found = estimate(np.array(losses)[None], np.array(counts), least=2)
    return found["value"], found["error"]


def test_two_clusters_of_unequal_size_are_weighted_by_their_tokens():
    """A mean of the clusters' means would say 1.5."""
    nll, stderr = mean_and_error([9.0, 2.0], [9, 1])
    assert nll == pytest.approx(1.1)
    # residuals 9 - 9.9 and 2 - 1.1: ±0.9, so sqrt(2 · (0.81 + 0.81)) / 10
    assert stderr == pytest.approx(math.sqrt(2 * 1.62) / 10)
    assert mean_and_error([3.0], [2]) == (1.5, None)


def test_equal_clusters_have_the_textbook_error():
    losses = np.random.default_rng(0).normal(8.0, 1.0, 50)
    nll, stderr = mean_and_error(losses, np.full(50, 4))
    assert nll == pytest.approx(losses.mean() / 4)
    assert stderr == pytest.approx(losses.std(ddof=1) / math.sqrt(50) / 4)
    assert standard_error(losses) == pytest.approx(losses.std(ddof=1) / math.sqrt(50))


def test_equal_documents_have_the_textbook_interval():
    """Of 11 equal documents: Student's t with 10 degrees of freedom, 2.228 in any statistics book."""
    losses = np.random.default_rng(0).normal(8.0, 1.0, 11)
    found = estimate(losses[None], np.full(11, 4.0))
    error = losses.std(ddof=1) / math.sqrt(11) / 4
    assert (found["value"], found["error"]) == (pytest.approx(losses.mean() / 4), pytest.approx(error))
    assert found["high"] - found["value"] == pytest.approx(2.228 * error, rel=1e-3)
    assert found["value"] - found["low"] == pytest.approx(2.228 * error, rel=1e-3)


def test_unequal_documents_have_the_interval_of_plain_matrices():
    """Of documents' means y with weights w: Σ a (y - w·y)² with a = w² / (1 - 2 w + Σ w²), as a quadratic form."""
    rng = np.random.default_rng(1)
    counts = np.exp(1.2 * rng.normal(size=20)) * 100
    y, w = rng.normal(2, 1, 20), counts / counts.sum()
    centring = np.eye(20) - np.outer(np.ones(20), w)
    form = centring.T @ np.diag(w**2 / np.diag(centring @ centring.T)) @ centring
    freedom = np.trace(form) ** 2 / np.trace(form @ form)
    found = estimate((y * counts)[None], counts)
    assert found["high"] - found["low"] == pytest.approx(2 * t_quantile(freedom) * math.sqrt(y @ form @ y))
    assert freedom < 10  # much less than 19: a few large documents decide


def test_fewer_than_ten_documents_have_no_interval():
    counts = np.full(ENOUGH_DOCUMENTS - 1, 4.0)
    found = estimate(counts[None] * 2, counts)
    assert found == {"value": 2.0, "error": None, "low": None, "high": None, "documents": 9}


def test_pairing_takes_out_what_two_measurements_share():
    """Documents of very different difficulty and size, and a small constant gain: unpaired, it would drown."""
    rng = np.random.default_rng(1)
    counts = rng.integers(10, 200, 60).astype(float)
    b = counts * rng.normal(2.0, 1.0, 60)
    a = b + 0.05 * counts + rng.normal(0, 0.01, 60) * counts
    found = estimate((a - b)[None], counts)
    assert found["value"] == pytest.approx(0.05, abs=0.01)
    assert found["error"] < 0.05 * math.hypot(mean_and_error(a, counts)[1], mean_and_error(b, counts)[1])
    assert estimate(a[None], counts, minus=b[None]) == found  # documents are paired, whatever the seeds


def test_seeds_add_their_own_variance():
    """The same documents, all of one difficulty: only the three seeds differ, and t has 2 degrees of freedom."""
    counts = np.full(12, 5.0)
    of_seed = np.array([0.451, 0.912, 1.138])  # logarithms of 1.57, 2.49 and 3.12
    found = estimate(of_seed[:, None] * counts, counts)
    error = of_seed.std(ddof=1) / math.sqrt(3)
    assert found["error"] == pytest.approx(error)
    assert math.exp(found["low"]) == pytest.approx(math.exp(of_seed.mean() - 4.303 * error), rel=1e-3)
    assert (math.exp(found["low"]), math.exp(found["high"])) == pytest.approx((0.96, 5.5), abs=0.05)


def test_other_seeds_are_compared_as_two_samples():
    counts = np.full(12, 5.0)
    a, b = (np.array(seeds)[:, None] * counts for seeds in ([1.0, 1.4, 1.5], [0.7, 0.9]))
    found = estimate(a, counts, minus=b)
    parts = [np.var([1.0, 1.4, 1.5], ddof=1) / 3, np.var([0.7, 0.9], ddof=1) / 2]
    assert found["error"] == pytest.approx(math.sqrt(sum(parts)))
    margin = math.sqrt(4.303**2 * parts[0] + 12.706**2 * parts[1])  # t of 2 and of 1 degree of freedom
    assert found["high"] - found["value"] == pytest.approx(margin, rel=1e-3)
    alone = estimate(a, counts, minus=b[:1])  # a single seed is taken to vary as the others do
    assert alone["error"] == pytest.approx(math.sqrt(parts[0] + 3 * parts[0]))


def test_equal_measurements_differ_by_nothing():
    counts = np.arange(1.0, 21)
    assert estimate(0 * counts[None], counts) == {"value": 0, "error": 0, "low": 0, "high": 0, "documents": 20}


def test_quantiles_of_students_t():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980, 1e7: 1.960}
    for freedom, expected in table.items():  # of any statistics book
        assert t_quantile(freedom) == pytest.approx(expected, rel=5e-4)


def test_a_perplexity_that_no_float_holds():
    assert exp(1000.0) == math.inf
    assert math.isnan(exp(math.nan))


def coverage(draw, repeats: int, rng) -> float:
    """How often the interval of draw(rng) = (arguments of estimate, true value) holds the true value."""
    inside = 0
    for _ in range(repeats):
        arguments, true = draw(rng)
        found = estimate(*arguments)
        inside += found["low"] <= true <= found["high"]
    return inside / repeats


def documents(kind: str, n: int, rng) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean losses and sizes of n documents, the sizes' logarithms with a standard deviation of 1.2; the true mean."""
    z = rng.normal(size=n)
    noise, sizes = rng.normal(size=n), np.exp(1.2 * z)
    if kind == "skewed":
        return np.exp(0.8 * noise), sizes, math.exp(0.32)
    if kind == "larger is harder":
        return 0.5 * z + noise, sizes, 0.6
    return noise, sizes, 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "skewed", "larger is harder"])
@pytest.mark.parametrize("n", [10, 20, 32, 100])
def test_intervals_cover_another_text(kind, n):
    """Nominal 95 % intervals, documents very unequal: at least 93 % at 20 documents, whatever their losses look like.

    Measured over 4,000 texts, in %, for 10, 20, 32 and 100 documents (normal; skewed; larger is harder):

        t(n - 1), Cochran's error                84 87 89 93    77 82 84 88    79 82 84 89
        the same, t(1 / Σ w² - 1)                94 92 93 94    87 87 87 89    89 87 88 90
        jackknife, t(n - 1)                      91 91 93 95    84 86 87 90    86 86 88 90
        t of Satterthwaite's degrees, Cochran's  97 97 97 97    91 92 92 93    93 92 92 94
        the same, residuals corrected (chosen)   99 98 98 98    95 95 94 94    96 95 95 94
    """

    def draw(rng):
        y, sizes, true = documents(kind, n, rng)
        return ((y * sizes)[None], sizes), true

    assert coverage(draw, 4000, np.random.default_rng(0)) > 0.93


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 10.0])  # of the seeds' standard deviation in that over documents
def test_intervals_cover_other_seeds_and_another_text(seeds, share, paired):
    """20 documents; a seed shifts all of them by as much, and each of them by itself. Never below 93 %.

    Measured over 2,000 experiments, in %, for 2, 3 and 5 seeds: at a share of 0, 0.3, 1 and 10 paired 99 99 98,
    99 99 99, 99 99 99, 96 96 97; against two other seeds 99 to 100. Joining the two variances in one t interval with
    Satterthwaite's degrees of freedom covers 91 % with two seeds at a share of 10.
    """

    def side(rng, count, of_document, sizes):
        over_text = share * math.sqrt((sizes**2).sum()) / sizes.sum()
        shifts = rng.normal(size=(count, 1)) * over_text + 0.5 * rng.normal(size=(count, len(sizes)))
        return (of_document + shifts) * sizes

    def draw(rng):
        y, sizes, true = documents("normal", 20, rng)
        a = side(rng, seeds, y, sizes)
        if paired:
            return (a, sizes), true
        return (a, sizes, side(rng, 2, 0 * y, sizes)), true

    assert coverage(draw, 2000, np.random.default_rng(0)) > 0.93
