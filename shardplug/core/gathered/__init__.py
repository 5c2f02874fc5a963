"""What user code does to parameters while they are whole: reads, writes, gradients."""
