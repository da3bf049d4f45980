"""The mesh: one package per service, and beside them the floor that all of them stand on."""
