"""A rank that dies, stands still or raises ends the job on all ranks, with the first cause.

Engines start it by the listener `Watchdog`. Every rank's thread writes a beat into the store that
the ranks found each other with, once a second, and looks at the next rank's. Beats show that a
process lives, not that it moves on: a long compilation, a save, a debugger's prompt are no alarm.
"""

from shardplug.watchdog.current import Watchdog, before_end, progress, raised, start, stop
from shardplug.watchdog.stall_limits import Limits

__all__ = ["Limits", "Watchdog", "before_end", "progress", "raised", "start", "stop"]
