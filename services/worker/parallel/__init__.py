"""Which rank holds what of a model, and what ranks exchange."""
