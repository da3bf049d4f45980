"""Spreads the refusals of long prompts over time, so that a flood of them leaves time for others. Knows no prompts.

A client that is refused at once sends its text again at once, and to receive and refuse 1 MiB takes about 1 ms of
processor time. The first refusals of a tenant are immediate; then its refused bytes have a rate.
"""

BYTES_PER_S = 16 << 20
BURST_BYTES = 4 << 20
"""Refused bytes of a tenant that nothing delays."""
MOST_S = 4.0
"""Longest delay of a refusal: what would wait longer is refused at once, so that what waits is bounded in bytes."""


class RefusalPace:
    """When each tenant's next refusal is due. Pure: the clock is an argument."""

    def __init__(self) -> None:
        self._free_at: dict[str, float] = {}

    def delay_s(self, tenant: str, size: int, now: float) -> float:
        """Counts a refused prompt of `size` bytes. -> how long to hold the refusal back, from 0 to MOST_S."""
        begins = max(self._free_at.get(tenant, 0.0), now - BURST_BYTES / BYTES_PER_S)
        ends = begins + size / BYTES_PER_S
        if ends - now > MOST_S:
            return 0.0
        self._free_at[tenant] = ends
        return max(0.0, ends - now)
