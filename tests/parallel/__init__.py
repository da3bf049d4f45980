"""Models on grids of ranks."""
