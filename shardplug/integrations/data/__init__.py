"""Data loaders: resumable ones, and data that ends earlier on one rank than on others."""
