"""Triton attention with sinks: each kernel beside its launcher, and the operators that torch sees."""
