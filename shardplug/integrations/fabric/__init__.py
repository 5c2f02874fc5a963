"""Sharded training with Lightning Fabric.

`import shardplug` is enough for `Fabric(strategy="zero3")`; this package has the class behind the
string, for options.
"""

from shardplug.integrations.common.namespace import FABRIC as _FABRIC
from shardplug.integrations.common.namespace import first_installed as _first_installed
from shardplug.integrations.fabric.strategy import strategy_class

__all__ = ["ZeroStrategy", "strategy_class"]

ZeroStrategy = strategy_class(_first_installed(_FABRIC))
"""The strategy for the import name in use: `lightning.fabric`, or `lightning_fabric`."""
