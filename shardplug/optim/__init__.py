"""What the engine does to the user's optimizers."""

from shardplug.optim.binding import Binding
from shardplug.optim.matrices import settle_matrix_optimizer

__all__ = ["Binding", "settle_matrix_optimizer"]
