"""How ranks on GPUs write to one another's memory: the places and the counts of exchanges. Knows words, no tensor's
meaning.

All ranks make the same exchanges in the same order, and count them. A short exchange goes through inboxes, a long one
through parcels:

    inbox     int64 [2, R, SHORT_WORDS]. A word is eight bytes that are written at once: four bytes of numbers and the
              exchange's count. Who reads the word sees whether it has arrived: no fence and no further message is
              needed (the idea of NCCL's protocol LL).
    parcels   int32 [2, R, capacity] numbers alone, then int32 [2, R, programs]: the count of the exchange whose numbers
              a program has written. Half the bytes, and one place to look at for each program.

Both have halves for odd and even exchanges, with a part for each sender. Two halves suffice: a rank that begins
exchange n + 2 has all numbers of exchange n + 1, which others send after they have read exchange n. Counts are int32
and wrap: 2^31 - 1 is followed by -2^31.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

WORD = 4
"""Bytes of numbers in a word."""
SHORT_WORDS = 1 << 17
"""Most words of an exchange through inboxes."""
LONG_BLOCK = 4096
"""Words that a program writes to parcels."""
SHORT = tl.constexpr(SHORT_WORDS)


@dataclass(frozen=True, slots=True)
class Peers:
    """A rank's way to the others."""

    rank: int
    inboxes: Tensor
    """int64 [R]: the address of each rank's inbox, as this rank reaches it."""
    parcels: Tensor
    """int64 [R]: that of its parcels."""
    capacity: int
    """Words that one exchange may have."""
    state: Tensor
    """int32 [2]: exchanges so far, and programs of this one that have ended; zeros at first."""


def inbox_bytes(ranks: int) -> int:
    """Bytes of an inbox."""
    return 2 * ranks * SHORT_WORDS * 8


def parcel_bytes(ranks: int, capacity: int) -> int:
    """Bytes of parcels for exchanges of `capacity` words."""
    return 2 * ranks * (capacity - (-capacity // LONG_BLOCK)) * WORD


@triton.jit
def memory(addresses, rank, kind: tl.constexpr):
    """A rank's memory."""
    return tl.load(addresses + rank).to(tl.pointer_type(kind))


@triton.jit
def next_exchange(state):
    """The count of the exchange that begins, an int32 in int64. To be called after `wait`."""
    return (tl.load(state, volatile=True) + 1).to(tl.int64)


@triton.jit
def end_exchange(state, exchange):
    """The last program of a kernel to call this counts the exchange -> whether it is this one."""
    programs = tl.num_programs(0) * tl.num_programs(1)
    last = programs == 1
    if programs > 1:
        last = tl.atomic_add(state + 1, 1) == programs - 1
        if last:
            tl.store(state + 1, 0)
    if last:
        tl.store(state, exchange.to(tl.int32))
    return last


@triton.jit
def put_words(inbox, numbers, at, mask, exchange):
    """Write int32 numbers to places of an inbox."""
    tl.store(inbox + at, (numbers.to(tl.int64) & 0xFFFFFFFF) | (exchange << 32), mask=mask)


@triton.jit
def take_words(inbox, at, mask, exchange):
    """The int32 numbers at places [n] of an inbox, once they have arrived."""
    word = tl.load(inbox + at, mask=mask, other=0, volatile=True)
    while tl.max(tl.where(mask & ((word >> 32) != exchange), 1, 0), 0) > 0:
        word = tl.load(inbox + at, mask=mask, other=0, volatile=True)
    return word.to(tl.int32)


@triton.jit
def post_count(place, exchange):
    """Let others see all that this program wrote before, and that it did so in this exchange."""
    tl.debug_barrier()
    tl.atomic_xchg(place, exchange.to(tl.int32), sem="release", scope="sys")


@triton.jit
def await_count(place, exchange):
    """Wait until the count at this place is that of the exchange."""
    seen = tl.atomic_add(place, 0, sem="acquire", scope="sys")
    while seen != exchange.to(tl.int32):
        seen = tl.atomic_add(place, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
