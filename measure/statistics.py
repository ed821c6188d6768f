"""Means of token losses with their errors. Sums over counts, never means of means; documents are what is resampled."""

import math

import numpy as np

ENOUGH_DOCUMENTS = 10  # fewer say too little of another text: no error and no interval


def standard_error(values: np.ndarray) -> float | None:
    """Of the mean of values (n,); None for a single one."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def estimate(
    losses: np.ndarray, counts: np.ndarray, minus: np.ndarray | None = None, least: int = ENOUGH_DOCUMENTS
) -> dict:
    """Mean loss per token over seeds and documents, or how much it is above another one; its error and 95 % interval.

    losses: float64 (seeds, documents), sums over the tokens of each document; counts: (documents,), those tokens.
    minus: (other seeds, documents), of a model with other seeds; of equal seeds the caller gives the differences.

    Returns value; error, the standard error (Cochran 1977, equation 2.46, over documents, plus the variance over
    seeds); low and high, the ends of the interval; documents. A side with one seed is taken to vary as the other side
    does. The interval adds the squared half widths of the sources' own t intervals (Zou and Donner 2008). Error and
    interval are None for fewer than `least` documents.
    """
    sides = [losses] if minus is None else [losses, minus]
    mean = losses.mean(axis=0) - (0 if minus is None else minus.mean(axis=0))
    total, n = counts.sum(), len(counts)
    value = float(mean.sum() / total)
    found = {"value": value, "error": None, "low": None, "high": None, "documents": n}
    if n < least:
        return found
    residuals, over_seeds = (mean - value * counts) / total, []  # variances with their degrees of freedom
    means = [side.sum(axis=1) / total for side in sides]
    varied = [side for side in means if len(side) > 1]
    for side in means if varied else []:
        source = side if len(side) > 1 else varied[0]
        over_seeds.append((float(source.var(ddof=1)) / len(side), len(source) - 1))
    found["error"] = math.sqrt(n / (n - 1) * float((residuals**2).sum()) + sum(v for v, _ in over_seeds))
    sources = [_document_variance(counts / total, residuals), *over_seeds]
    margin = math.sqrt(sum(t_quantile(freedom) ** 2 * variance for variance, freedom in sources))
    return found | {"low": value - margin, "high": value + margin}


def _document_variance(weights: np.ndarray, residuals: np.ndarray) -> tuple[float, float]:
    """Variance of a mean of documents with these weights (n,), which sum to 1, and its degrees of freedom.

    residuals: (n,), weight times the document's mean less the mean. Were all documents' means equally variable, their
    squares would fall short by the factor 1 - 2 w + Σ w²; the variance is free of that bias, and its degrees of freedom
    are those of its quadratic form (Bell and McCaffrey 2002, "Bias reduction in standard errors for linear regression
    with multi-stage samples", for a weighted mean).
    """
    s = float((weights**2).sum())
    v = s / 2 - weights
    a = weights**2 / (1 + 2 * v)  # the form is y' M' diag(a) M y with M = I - 1 w', so M M' = I + v 1' + 1 v'
    variance = float((residuals**2 / (1 + 2 * v)).sum())
    square = 2 * (a.sum() * (a * v**2).sum() + (a * v).sum() ** 2) + (a**2 * (1 + 4 * v)).sum()
    return variance, max(1.0, float(s**2 / square)) if square > 0 else 1.0  # rounding, where one document is all


def t_quantile(freedom: float) -> float:
    """The 97.5 % point of Student's t; freedom: at least 1, need not be whole.

    With t = √freedom tan θ the density is proportional to cos(θ)^(freedom - 1).
    """
    angle = np.linspace(0, min(math.pi / 2, 10 / math.sqrt(freedom)), 2001)
    density = np.maximum(np.cos(angle), 0) ** (freedom - 1)
    below = np.concatenate(([0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return float(math.sqrt(freedom) * math.tan(np.interp(0.95 * below[-1], below, angle)))


def exp(nll: float) -> float:
    """Perplexity of a mean loss in nats; infinite where a float cannot hold it."""
    return math.inf if nll >= 700 else math.exp(nll)
