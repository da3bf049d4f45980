"""`python -m services.worker`"""

from services.worker.main import run

run()
