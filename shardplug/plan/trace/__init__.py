"""One micro-batch traced on tensors without memory."""
