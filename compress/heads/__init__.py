"""Draft heads: their network and their training."""
