"""Reading a checkpoint folder into models and optimizers of any layout."""
