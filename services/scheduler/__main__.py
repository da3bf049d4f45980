"""`python -m services.scheduler` runs the scheduler."""

from services.scheduler.main import run

run()
