"""What Hugging Face's Trainer uses in the place of Accelerate's own."""
