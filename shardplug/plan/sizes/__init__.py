"""Sizes in bytes: units, parameters, gradients, optimizer state and tiers."""
