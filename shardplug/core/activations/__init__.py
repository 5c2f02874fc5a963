"""Activations in CPU memory between forward and backward, and activation checkpointing."""
