"""State by name: parameters, buffers, optimizer state, parameter groups, random state."""
