"""Runs the scheduler: `python -m services.scheduler`."""

from services import process

process.run("services.scheduler.main")
