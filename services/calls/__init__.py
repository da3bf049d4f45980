"""Calls of a gRPC server: how they wake the event loop and are accepted, and what surrounds their handlers."""
