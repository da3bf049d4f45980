"""`python -m services.cache` runs the cache service."""

from services import process

process.run("services.cache.main")
