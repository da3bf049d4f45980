"""Decoders that another runtime computes: their signature, keys and values, and the runner over them."""
