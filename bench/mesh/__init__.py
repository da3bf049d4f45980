"""Benchmarks of the whole mesh: real processes that talk gRPC on loopback."""

from services.process import prepare_grpc

prepare_grpc()  # gRPC reads its settings when it is imported: a client's time would count as the mesh's.
