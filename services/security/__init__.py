"""Who a process is and what it may do: identities, roles, certificates, and the id of the mesh."""
