"""Sharded training with Lightning Fabric.

`import shardplug` is enough for `Fabric(strategy="zero3")`; this package has the class behind the
string, for options.
"""

from shardplug.fabric.strategy import strategy_class
from shardplug.hosts.namespace import FABRIC as _FABRIC
from shardplug.hosts.namespace import first_installed as _first_installed

__all__ = ["ZeroStrategy", "strategy_class"]

ZeroStrategy = strategy_class(_first_installed(_FABRIC))
"""The strategy for the import name in use: `lightning.fabric`, or `lightning_fabric`."""
