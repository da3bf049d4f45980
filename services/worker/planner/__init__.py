"""Pure policy: which sequences take part in the next step."""
