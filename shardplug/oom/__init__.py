"""Out-of-memory errors that explain themselves."""
