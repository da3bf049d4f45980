"""The gateway's connections to scheduler, workers and cache."""
