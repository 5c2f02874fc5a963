"""The plan of memory and time: what each stage and tier would hold, before the launch."""
