"""Servers of `Embed` that are not Weft's, in child processes of `bench.mesh.embed`."""
