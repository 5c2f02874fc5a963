"""Hugging Face models whose weights are read from safetensors files, each rank its own rows."""

from shardplug.hf.loading import LoadReport, load_pretrained
from shardplug.hf.pretrained import from_pretrained

__all__ = ["LoadReport", "from_pretrained", "load_pretrained"]
