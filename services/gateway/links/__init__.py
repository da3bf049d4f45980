"""The gateway's side of the mesh."""
