"""Products of one row or a few on a Hopper, each tile by one program: with 16-bit, packed and experts' weights."""
