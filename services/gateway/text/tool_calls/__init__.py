"""Tool calls in the text of answers."""
