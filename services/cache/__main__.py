"""`python -m services.cache` runs the cache service."""

from services.cache.main import run

run()
