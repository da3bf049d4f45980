"""Vectors that were computed before: those of this process, and those in the cache."""
