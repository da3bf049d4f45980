"""From the folder of an encoder to its engine."""
