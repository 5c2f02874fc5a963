"""Writing a checkpoint folder, also in the background."""
