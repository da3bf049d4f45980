"""Blocks out of the GPU memory of other workers of this host."""
