"""What ranks exchange during a step: gathers, reductions, and checks that they agree."""
