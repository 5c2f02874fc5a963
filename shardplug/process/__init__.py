"""What this process holds, and the limits of its machine."""
