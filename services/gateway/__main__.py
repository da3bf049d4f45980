"""`python -m services.gateway` runs the gateway."""

from services import process

process.run("services.gateway.processes")
