"""From a Call to its receipt, whatever the door."""
