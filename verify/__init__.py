"""Proves that a compressed checkpoint is still the model it was made from, on the worker's own code. Makes none."""
