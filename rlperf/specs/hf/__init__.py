"""Architectures from the ``config.json`` of Hugging Face: what its fields mean, by family and by part of a model."""
