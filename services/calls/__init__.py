"""Calls of a gRPC server: how they are accepted, how long they wait for that, and what surrounds their handlers."""
