"""Benchmarks of single kernels on one GPU, and the search for their tile shapes. Knows no engine."""
