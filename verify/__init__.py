"""Compares a compressed checkpoint with the model it was made from, computed by the worker's code. Makes none."""
