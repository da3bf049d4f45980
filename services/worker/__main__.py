"""`python -m services.worker`"""

from services import process

process.run("services.worker.main")
