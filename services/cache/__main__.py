"""Runs the cache service: `python -m services.cache`."""

from services import process

process.run("services.cache.main")
