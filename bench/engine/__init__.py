"""Benchmarks of the bare engine in one process: no network, no clients."""
