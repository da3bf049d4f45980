"""The device side of the engine."""
