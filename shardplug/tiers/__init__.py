"""Where state lives outside the device: CPU memory, and files on NVMe drives.

A tier keeps regions of bytes. Whoever uses one reads a region ahead, gets its bytes, changes them
and puts them back; what happens in between, and how much memory it takes, is the tier's own.
"""

from shardplug.tiers.placement import PATH_VARIABLE, open_tier
from shardplug.tiers.protocol import Region, Tier, Traffic

__all__ = ["PATH_VARIABLE", "Region", "Tier", "Traffic", "open_tier"]
