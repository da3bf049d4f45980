"""The engine service by which other gateways drive a worker."""
