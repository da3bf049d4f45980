"""One mesh on one machine."""
