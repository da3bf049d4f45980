"""Requests to encoders: texts in, vectors or scores out."""
