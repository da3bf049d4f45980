"""How ranks and workers on GPUs reach one another's memory, and what ranks exchange over it."""
