"""Attention implementations, one file each, and the choice among them."""
