"""Measured memory of a run: rows, sinks, alerts and pictures."""
