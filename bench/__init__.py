"""Benchmarks: of single kernels, of the bare engine, of the whole mesh; and figures of other servers."""
