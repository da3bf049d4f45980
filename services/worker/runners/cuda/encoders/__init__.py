"""Encoders on a GPU: their operations, and what executes their batches."""
