"""What the engine does to the user's optimizers."""

from shardplug.optim.binding import Binding
from shardplug.optim.matrices import refuse_matrix_optimizer
from shardplug.optim.step import step_on_shards
from shardplug.optim.trial import try_on_copies

__all__ = ["Binding", "refuse_matrix_optimizer", "step_on_shards", "try_on_copies"]
