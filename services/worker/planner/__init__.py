"""Pure policy: who takes part in the next step."""
