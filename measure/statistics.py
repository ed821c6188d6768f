"""Means of token losses with their errors. Sums over counts, never means of means; clusters of windows, not tokens."""

import math
from typing import Any

import numpy as np


def summed(values: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Sums of `values` (n,) over each distinct id in `clusters` (n,), in the order of the ids."""
    _, index = np.unique(clusters, return_inverse=True)
    return np.bincount(index, weights=values)


def ratio_and_error(
    losses: np.ndarray, counts: np.ndarray, clusters: np.ndarray | None = None
) -> tuple[float, float | None]:
    """Σ losses / Σ counts over windows (n,), and its standard error (Cochran 1977, equation 2.46).

    clusters: ids (n,); windows of one id count as one, since those of one document are alike. None: each for itself.
    The error is None for a single cluster.
    """
    if clusters is not None:
        losses, counts = summed(losses, clusters), summed(counts, clusters)
    ratio = losses.sum() / counts.sum()
    return float(ratio), _error(losses - ratio * counts, counts.sum())


def standard_error(values: np.ndarray) -> float | None:
    """Of the mean of values (n,); None for a single one."""
    return ratio_and_error(values, np.ones(len(values)))[1]


def difference_and_error(
    a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float | None]:
    """Mean loss of a minus that of b, and its standard error over the clusters that both are sums over.

    a, b: (losses, counts), (clusters,) each. The difference of two ratio estimators, linearised (Cochran 1977,
    section 6.19): where a and b have equal counts, it is the paired error of their difference.
    """
    ratios, residuals = [], []
    for losses, counts in (a, b):
        ratios.append(losses.sum() / counts.sum())
        residuals.append((losses - ratios[-1] * counts) / counts.sum())
    return float(ratios[0] - ratios[1]), _error(residuals[0] - residuals[1], 1.0)


def _error(residuals: np.ndarray, total: float) -> float | None:
    n = len(residuals)
    return float(math.sqrt(n / (n - 1) * (residuals**2).sum()) / total) if n > 1 else None


def t_quantile(freedom: int) -> float:
    """The 97.5 % point of Student's t, 2 degrees of freedom at least (Abramowitz and Stegun 1964, 26.7.5; to 1 %)."""
    z, n = 1.959963984540054, freedom
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return z + sum(terms)


def interval(value: float, error: float | None, clusters: int) -> tuple[float, float] | None:
    """The 95 % interval of a value whose error is over so many clusters; None for fewer than three."""
    if error is None or clusters < 3:
        return None
    margin = t_quantile(clusters - 1) * error
    return value - margin, value + margin


def mean_and_spread(values: list[float]) -> tuple[float, float | None]:
    """Mean, and standard deviation over seeds (n - 1); None for a single one."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def exp(nll: float) -> float:
    """Perplexity of a mean loss in nats; infinite where a float cannot hold it."""
    return math.inf if nll >= 700 else math.exp(nll)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: None stands for both."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
