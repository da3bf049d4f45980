"""Benchmarks of the whole mesh: real processes that talk gRPC on loopback."""
