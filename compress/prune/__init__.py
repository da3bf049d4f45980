"""Pruning of single weights, and of neurons, heads and layers."""
