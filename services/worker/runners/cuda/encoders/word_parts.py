"""Where the parts of a batch are in its words."""

_ALIGNED = 4
"""Words: kernels are compiled for parts that begin at multiples of 16 bytes."""


def word_parts(*sizes: int) -> tuple[slice, ...]:
    """The parts of these sizes, one behind another."""
    found, begin = [], 0
    for size in sizes:
        found.append(slice(begin, begin + size))
        begin += -(-size // _ALIGNED) * _ALIGNED
    return tuple(found)
