"""Quantization: a recipe for each method, and what recipes share."""
