"""Sharding on PyTorch's own FSDP2: the stage table, the schedule, units, weights, gradients."""
