"""A model on a grid of ranks: their processes, and the part of each."""
