"""The checkpoint folder on disk: manifest, checksums, publishing."""
