"""Writes the folder of a compressed model."""
