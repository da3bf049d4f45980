"""The runner on a CPU."""
