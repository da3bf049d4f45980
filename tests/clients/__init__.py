"""Unmodified clients of other projects, each checked against a running mesh in an environment of its own."""
