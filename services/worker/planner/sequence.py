"""One job on its way through the engine: its tokens, its blocks and what it has cost. Knows counts, never tensors."""

from services.hashing import block_keys, chain_root
from services.worker.job import Cost, Job


class Sequence:
    """The state of a job. The planner owns slot, blocks and counts; the engine owns tokens and times.

    `total` counts the tokens there are, those included that are still being computed: the next step can be planned
    before their values are known.
    """

    def __init__(
        self, job: Job, arrival: int, now: float, block_size: int, max_length: int, fingerprint: bytes
    ) -> None:
        self.job = job
        self.arrival = arrival
        self.block_size = block_size
        self.limit = min(job.boundary + job.params.max_tokens, max_length)
        self.tokens: list[int] = list(job.token_ids)
        self.total = len(self.tokens)
        self.computed = 0
        self.published = 0
        self.slot: int | None = None
        self.blocks: list[int] = []
        self.found_tokens = 0  # in the cache, when it got its slot
        self.prefill_end = 0  # tokens it had when it got its slot: what comes later the device made itself
        self.told_blocks = 0
        self.flying = 0  # steps in flight that it has a row in
        self.preemptions = 0
        self._keys: list[bytes] = []
        self._root = chain_root(job.salt, fingerprint)
        self.arrived_s, self.started_s, self.first_token_s, self.last_token_s = now, 0.0, 0.0, 0.0
        self.preempted_s: list[float] = []
        self.prefill_tokens = self.cached_tokens = self.fetched_tokens = self.steps = self.prefill_steps = 0
        self.parked = False  # it waits for blocks that are being fetched for it
        self.fetched: set[bytes] = set()  # keys of those that came

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the smallest."""
        return (-self.job.priority, self.arrival)

    @property
    def position(self) -> int:
        """Tokens of the answer whose values are known."""
        return len(self.tokens) - self.job.boundary

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next new one; 0 when all there will be are on their way."""
        return 0 if self.total >= self.limit else self.total - self.computed

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    @property
    def most_blocks(self) -> int:
        """Blocks it needs at most: the last token of an answer is never computed."""
        return self.blocks_for(max(self.limit - 1, 1))

    @property
    def has_new_blocks(self) -> bool:
        """Whether it got blocks that the device does not know of."""
        return self.told_blocks < len(self.blocks)

    def keys(self, blocks: int) -> list[bytes]:
        """Keys of its first whole blocks."""
        assert blocks * self.block_size <= len(self.tokens), "only whole blocks have keys"
        if len(self._keys) < blocks:
            new = self.tokens[len(self._keys) * self.block_size : blocks * self.block_size]
            self._keys += block_keys(new, self.block_size, self._keys[-1] if self._keys else self._root)
        return self._keys[:blocks]

    def key(self, index: int) -> bytes:
        """Of one of its whole blocks; those up to it, and some behind it, are made and kept."""
        if index >= len(self._keys):
            self.keys(min(2 * index + 1, len(self.tokens) // self.block_size))
        return self._keys[index]

    def cost(self, now: float) -> Cost:
        """What it has cost until now."""
        started = self.started_s or now
        first = self.first_token_s or now
        return Cost(
            queue_s=started - self.arrived_s,
            prefill_s=first - started,
            decode_s=(self.last_token_s or now) - first,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            steps=self.steps,
            prefill_steps=self.prefill_steps,
            fetched_tokens=self.fetched_tokens,
            first_token=self.first_token_s > 0,
            preempted_s=tuple(at - self.arrived_s for at in self.preempted_s),
        )

    def note_pauses(self, now: float) -> None:
        """The planner, which knows no clock, may have paused it since the last time."""
        while len(self.preempted_s) < self.preemptions:
            self.preempted_s.append(now)
