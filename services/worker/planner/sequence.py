"""A job as the planner sees it: its tokens, its slot and blocks, and how far it is computed. Knows counts, never times.

The planner is the only writer of a sequence; everybody else reads it.
"""

from collections.abc import Sequence as Many

from services.hashing import adapted, block_keys, chain_root
from services.worker.job import Job


class BlockKeys:
    """Keys of the whole blocks of a growing list of tokens. A key is computed when it is first asked for, and kept."""

    __slots__ = ("_block_size", "_keys", "_root", "_tokens")

    def __init__(self, tokens: Many[int], block_size: int, root: bytes) -> None:
        """root: what the first block's key is chained to."""
        self._tokens, self._block_size, self._root = tokens, block_size, root
        self._keys: list[bytes] = []

    def first(self, count: int) -> list[bytes]:
        """Keys of the first `count` blocks, all of which must be whole."""
        return self.between(0, count)

    def between(self, begin: int, count: int) -> list[bytes]:
        """Those of the first `count` keys that begin with block `begin`."""
        assert count * self._block_size <= len(self._tokens), "only whole blocks have keys"
        known = len(self._keys)
        if known < count:
            new = self._tokens[known * self._block_size : count * self._block_size]
            self._keys += block_keys(new, self._block_size, self._keys[-1] if known else self._root)
        return self._keys[begin:count]

    def index(self, key: bytes) -> int:
        """The block that has a key which was computed before. Raises ValueError."""
        return self._keys.index(key)

    def at(self, index: int) -> bytes:
        """The key of one whole block. Keys of some blocks behind it are computed at the same time."""
        if index >= len(self._keys):
            self.first(min(2 * index + 1, len(self._tokens) // self._block_size))
        return self._keys[index]


class Sequence:
    """The progress of one job.

    `total` counts all tokens, including those that are still being computed: the next step can be planned before their
    values are known. `tokens` holds those whose values are known.
    """

    __slots__ = (
        "adapter_slot", "arrival", "block_size", "blocks", "cached_tokens", "computed", "fetched_keys",
        "fetched_tokens",
        "found_tokens", "job", "keys", "last_step", "limit", "preemptions", "prefill_end", "published", "queue_key",
        "sent_blocks", "slot", "tokens", "total", "waiting_for_blocks",
    )  # fmt: skip

    def __init__(self, job: Job, arrival: int, block_size: int, max_length: int, fingerprint: bytes) -> None:
        """arrival: the number of the job among all that arrived. max_length: most tokens of prompt and answer."""
        self.job, self.arrival, self.block_size = job, arrival, block_size
        self.queue_key = (-job.priority, arrival)
        """The sequence with the smallest key goes first."""
        self.limit = min(job.prompt_len + job.params.max_tokens, max_length)
        """Tokens at which the answer ends, or is handed off."""
        if job.handoff:
            self.limit = min(self.limit, len(job.token_ids) + 1)
        self.tokens: list[int] = list(job.token_ids)
        adapter = job.adapter.fingerprint if job.adapter is not None else b""
        self.keys = BlockKeys(self.tokens, block_size, chain_root(job.salt, adapted(fingerprint, adapter)))
        self.total = len(self.tokens)
        self.computed = 0
        """Tokens whose keys and values are stored, or will be when the steps in flight are over."""
        self.published = 0
        """Blocks that other sequences can find."""
        self.slot: int | None = None
        self.adapter_slot = 0
        """Where its adapter is while it has a slot; 0: it has none."""
        self.blocks: list[int] = []
        self.sent_blocks = 0
        """Blocks that the device was sent."""
        self.found_tokens = 0
        """Tokens found in the prefix cache when the sequence got its slot."""
        self.prefill_end = 0
        """Tokens that the sequence had when it got its slot. The device itself produced all later ones."""
        self.last_step = 0
        """The number of the last launched step in which the sequence has a row."""
        self.preemptions = 0
        self.waiting_for_blocks = False
        """Blocks are being fetched for it from a lower tier."""
        self.fetched_keys: set[bytes] = set()
        """Keys of the blocks that were fetched for it."""
        self.cached_tokens = self.fetched_tokens = 0
        """Prompt tokens that the device's prefix cache held, and those fetched from a lower tier."""

    @property
    def guessable(self) -> bool:
        """Whether its tokens may be guessed: not where what is banned depends on each token before."""
        return not self.job.params.bad_sequences

    @property
    def position(self) -> int:
        """Tokens of the answer whose values are known."""
        return len(self.tokens) - self.job.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next new one; 0 when all tokens there will be are already being computed."""
        return 0 if self.total >= self.limit else self.total - self.computed

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    @property
    def most_blocks(self) -> int:
        """Blocks that the sequence needs at most. The last token of an answer is never computed."""
        return self.blocks_for(max(self.limit - 1, 1))

    def take_new_blocks(self) -> tuple[int, list[int]]:
        """The index of the first block that the device was not sent, and the blocks from there on. They count as sent
        from now on."""
        first, self.sent_blocks = self.sent_blocks, len(self.blocks)
        return first, self.blocks[first:]
