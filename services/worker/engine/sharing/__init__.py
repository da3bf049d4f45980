"""What other workers get of an engine's blocks."""
