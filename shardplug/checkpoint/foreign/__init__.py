"""Checkpoint folders that other tools wrote."""
