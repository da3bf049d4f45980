"""Load through the public door: requests made from a plan, sent by client processes, counted and reported."""
