"""Text to tokens and back, and the answer so far."""
