"""One reader per quantized format."""
