"""Training of compressed networks: the run, attention over windows, distillation."""
