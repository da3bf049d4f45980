"""What the mesh sees of a worker."""
