"""The runner on an NVIDIA GPU."""
