"""Guesses by suffixes: what followed the longest run of last tokens, here and in the tenant's earlier answers.

Knows token ids and salts, no model. The idea is SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975); instead of a
tree in memory, the places of each run of three tokens are indexed, and the few places that match are walked as a tree.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from services.worker.job import Job

LEAST, LONGEST = 3, 32
"""Tokens of a run that is looked up, and tokens of a match that are compared."""
MOST_PLACES = 16
"""Places kept for each run, the last ones. The continuation of each has one vote."""
INDEXED_AT_ONCE = 4096
"""Tokens of a prompt that are indexed in a step: a longer one becomes searchable in the course of some steps."""
MOST_OWN_TOKENS = 1 << 16
"""Tokens of a sequence that are indexed."""
TENANT_TOKENS, ALL_TOKENS = 1 << 15, 1 << 18
"""Tokens of earlier answers that are kept of one tenant (as a multiple of generations), and of all together."""

Place = tuple[Sequence[int], int]
"""A list of tokens, and the index of the token after a run in it."""
_Index = dict[tuple[int, ...], list[Place]]


class _Own:
    """The places of one sequence."""

    __slots__ = ("done", "index")

    def __init__(self) -> None:
        self.index: _Index = {}
        self.done = LEAST
        """Index of the next token whose place is not indexed."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index further tokens."""
        end = min(len(token_ids), self.done + INDEXED_AT_ONCE, MOST_OWN_TOKENS)
        for at in range(self.done, end):
            _add(self.index, token_ids, at)
        self.done = max(self.done, end)


class _Earlier:
    """The answers of one tenant: a young generation that grows, and an old one that goes when the young one is full."""

    __slots__ = ("old", "old_tokens", "young", "young_tokens")

    def __init__(self) -> None:
        self.young: _Index = {}
        self.old: _Index = {}
        self.young_tokens = self.old_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens that are kept."""
        return self.young_tokens + self.old_tokens

    def add(self, tokens: Sequence[int]) -> None:
        """Index an answer."""
        if self.young_tokens >= TENANT_TOKENS:
            self.old, self.old_tokens = self.young, self.young_tokens
            self.young, self.young_tokens = {}, 0
        for at in range(LEAST, len(tokens)):
            _add(self.young, tokens, at)
        self.young_tokens += len(tokens)


class SuffixProposer:
    """A `Proposer` that remembers answers of tenants, each apart. A job that bypasses the caches leaves nothing."""

    def __init__(self) -> None:
        self._own: dict[int, _Own] = {}
        self._earlier: OrderedDict[bytes, _Earlier] = OrderedDict()
        """By salt, the least recently used first."""

    def propose(self, job: Job, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """The continuation that most of the longest matches have, at most as long as the match."""
        own = self._own.setdefault(job.key, _Own())
        own.extend(token_ids)
        if len(token_ids) < LEAST:
            return ()
        run = tuple(token_ids[-LEAST:])
        earlier = None if job.bypass_cache else self._earlier.get(job.salt)
        sources = [own.index, *((earlier.young, earlier.old) if earlier else ())]
        places = list(chain.from_iterable(index.get(run, ()) for index in sources))
        if not places:
            return ()
        matches = [_matching(place, token_ids) for place in places]
        longest = max(matches)
        best = [place for place, match in zip(places, matches, strict=True) if match == longest]
        return list(_walk(best, min(most, longest)))

    def ended(self, job: Job, token_ids: Sequence[int]) -> None:
        """Remember the answer for its tenant's later ones."""
        self._own.pop(job.key, None)
        answer = list(token_ids[max(job.prompt_len - LEAST, 0) :][:TENANT_TOKENS])
        if job.bypass_cache or len(answer) <= LEAST:
            return
        self._earlier.setdefault(job.salt, _Earlier()).add(answer)
        self._earlier.move_to_end(job.salt)
        while sum(each.tokens for each in self._earlier.values()) > ALL_TOKENS:
            self._earlier.popitem(last=False)


def _add(index: _Index, tokens: Sequence[int], at: int) -> None:
    places = index.setdefault(tuple(tokens[at - LEAST : at]), [])
    places.append((tokens, at))
    if len(places) > MOST_PLACES:
        del places[0]


def _matching(place: Place, token_ids: Sequence[int]) -> int:
    """How many tokens before the place are the last ones of the sequence."""
    tokens, at = place
    most = min(LONGEST, at, len(token_ids))
    return next((back for back in range(LEAST, most) if tokens[at - back - 1] != token_ids[-back - 1]), most)


def _walk(places: Sequence[Place], most: int) -> Iterator[int]:
    """The most frequent next token, the latest of equals, again and again among the places that agree so far."""
    for offset in range(most):
        counts = Counter(tokens[at + offset] for tokens, at in reversed(places) if at + offset < len(tokens))
        if not counts:
            return
        token = counts.most_common(1)[0][0]
        yield token
        places = [(tokens, at) for tokens, at in places if at + offset < len(tokens) and tokens[at + offset] == token]
