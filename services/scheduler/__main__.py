"""`python -m services.scheduler` runs the scheduler."""

from services import process

process.run("services.scheduler.main")
