"""Encoders: networks that read whole texts at once."""
