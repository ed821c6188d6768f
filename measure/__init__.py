"""Measuring trained models past their training length: windows, losses, errors, probes, tables and plots.

text = Text(tokens, offsets, bytes_per_token, about)
measurements = measure(model, text, Scoring(lengths=(256, 512)), {"run": "rope"})   # one per protocol
print(Report(measurements).text())
"""

from measure.measurement import Measurement, Scoring, Text, evaluate_lengths, measure
from measure.report import Report, comparability
from measure.tables import with_error

__all__ = ["Measurement", "Report", "Scoring", "Text", "comparability", "evaluate_lengths", "measure", "with_error"]
