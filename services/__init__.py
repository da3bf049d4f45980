"""The services of the mesh, one package each, and beside them the modules that all services share."""
