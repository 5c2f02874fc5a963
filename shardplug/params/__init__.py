"""Parameters and gradients that rest in a tier: read before they are gathered, dropped after."""

from shardplug.params.tier import ParameterTier

__all__ = ["ParameterTier"]
