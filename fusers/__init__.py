"""Reads a model's source and says what its attention is given."""
