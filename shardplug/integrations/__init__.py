"""One folder for each framework, and what they share."""
