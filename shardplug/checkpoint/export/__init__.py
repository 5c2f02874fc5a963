"""Weights out of a checkpoint or a live model, as a Hugging Face folder."""
