"""Measures links, gateways, admission and planning without a model, and server-sent events beside another gateway."""
