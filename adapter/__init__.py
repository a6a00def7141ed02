"""Placeholder until the public names land."""
