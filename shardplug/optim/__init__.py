"""What the engine does to the user's optimizers."""

from shardplug.optim.binding import Binding

__all__ = ["Binding"]
