"""Measurements of the length laboratory, beside the plain perplexity of eval.py."""
