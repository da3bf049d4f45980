"""`python -m services.gateway` runs the gateway."""

from services.gateway.main import main

main()
