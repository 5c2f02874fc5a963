"""The plan of a run that has begun, read from its engine and its first batch."""
