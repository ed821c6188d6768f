"""Measuring trained models past their training length: windows, errors, probes, tables and plots."""
