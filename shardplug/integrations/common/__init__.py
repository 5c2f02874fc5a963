"""What the Lightning and the Fabric adapter share. Knows torch and the engine, no framework.

Framework classes that a function needs are handed in, or looked up by the name of the namespace
("lightning.pytorch", "lightning_fabric", ...) at the moment of use.
"""
