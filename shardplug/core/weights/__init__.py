"""Initial weights: the same on every rank, from meta, from rank 0 or from files."""
