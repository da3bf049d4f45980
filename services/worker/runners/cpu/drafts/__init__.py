"""Draft models, one token or all at a time, and draft heads beside the served model, on a CPU."""
