"""The planner: which sequences take part in the next step, with how many tokens, and who must wait or make room.

Pure: knows sequences and blocks, never tensors, threads or the clock. It needs no token's value to plan the next step.
"""

import bisect
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from services.worker.planner.block_pool import BlockPool
from services.worker.planner.sequence import Sequence
from services.worker.planner.token_budget import TokenBudget

# A sequence that was paused this often is not paused again: when it comes back it takes all blocks it can ever need.
MOST_PREEMPTIONS = 3

_rank = attrgetter("rank")


class Row(NamedTuple):
    """A sequence's part in a step."""

    sequence: Sequence
    start: int
    """Index of its first token in the sequence."""
    tokens: int
    """Tokens to compute."""
    samples: bool
    """A new token follows: these are the last ones there are."""


@dataclass(slots=True)
class Plan:
    """One step."""

    budget: int
    """Tokens that may still be added."""
    rows: list[Row] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """They have a slot since this step."""
    released: list[int] = field(default_factory=list)
    """Slots that became empty since the last step; an admitted sequence may have one of them again."""

    def drop(self, sequence: Sequence) -> None:
        """The sequence takes no part after all."""
        self.budget += sum(row.tokens for row in self.rows if row.sequence is sequence)
        self.rows = [row for row in self.rows if row.sequence is not sequence]


class Planner:
    """Waiting and running sequences and the pool they share. Its one writer is the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        slots: int,
        step_tokens: int,
        prefix_cache: bool,
        chunk_tokens: int | None = None,
    ) -> None:
        if step_tokens < slots:
            raise ValueError(f"step_tokens {step_tokens} is less than max_batch_size {slots}: some rows would starve")
        self.pool, self.block_size = pool, block_size
        self.step_tokens, self.prefix_cache = step_tokens, prefix_cache
        self._shares = None if chunk_tokens is None else TokenBudget(chunk_tokens, step_tokens)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        """Done, but a step in flight may still write to their blocks."""
        self.preemptions = 0
        self._free_slots = list(range(slots - 1, -1, -1))
        self._released: list[int] = []
        self._computing: dict[bytes, Sequence] = {}
        self._begun: list[tuple[Sequence, int]] = []
        """Whose blocks, up to which, are still to be noted as being computed: making keys can wait for the launch."""

    def fits(self, sequence: Sequence) -> bool:
        """Whether it can run when it is alone."""
        return sequence.most_blocks <= self.pool.total

    def add(self, sequence: Sequence) -> None:
        """The sequence waits for its turn."""
        bisect.insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """A sequence is done, whatever the reason: its slot and blocks are free for others, at once or when the last
        step in flight that may still write to them has landed."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if sequence.flying:
            self.leaving.append(sequence)
        else:
            self._vacate(sequence)

    def land(self, sequence: Sequence) -> None:
        """A step in flight with a row of this sequence is over."""
        sequence.flying -= 1
        if not sequence.flying and sequence in self.leaving:
            self.leaving.remove(sequence)
            self._vacate(sequence)

    def plan(self) -> Plan:
        """Decide the next step: running answers first, then prompts, then who waits, within the token budget."""
        self._note_begun()
        plan = Plan(self.step_tokens)
        before = self.preemptions
        prompts = self._schedule_answers(plan)
        if plan.rows and self._shares is not None:
            taken = self.step_tokens - plan.budget
            line = [*prompts, *self.waiting[: len(self._free_slots)]]
            begun = sum(len(row.sequence.tokens) > row.sequence.prefill_end for row in plan.rows) if line else 0
            context = prompts[0].computed if prompts else 0
            share = self._shares.step([sequence.arrival for sequence in line], context, taken, begun)
            plan.budget = max(share - taken, 0)
        for sequence in prompts:
            if sequence.slot is not None:
                self._schedule(sequence, sequence.remaining, plan)
        if self.preemptions == before:
            self._admit(plan)
        if plan.rows:  # Else no step is launched that could tell of them.
            plan.released, self._released = self._released, []
        return plan

    def commit(self, row: Row) -> None:
        """The row's tokens are computed and their values known: whole blocks can be found from now on."""
        sequence = row.sequence
        whole = min(row.start + row.tokens, len(sequence.tokens)) // self.block_size
        if whole <= sequence.published or sequence.slot is None or not self.caches(sequence):
            return
        for index, key in enumerate(sequence.keys(whole)[sequence.published :], sequence.published):
            self.pool.publish(sequence.blocks[index], key)
            if self._computing.get(key) is sequence:
                del self._computing[key]
        sequence.published = whole

    def usable_blocks(self, sequence: Sequence) -> int:
        """How many blocks it may find in the cache: whole ones, before its last token, which is always computed."""
        return (len(sequence.tokens) - 1) // self.block_size if self.caches(sequence) else 0

    def usable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of these blocks."""
        return sequence.keys(self.usable_blocks(sequence))

    def is_computing(self, key: bytes) -> bool:
        """Whether a running sequence is about to publish this block."""
        self._note_begun()
        return key in self._computing

    def cut(self, sequence: Sequence, tokens: int) -> None:
        """Only its first `tokens` tokens count: what lies beyond is not to be found in the cache."""
        for block in sequence.blocks[tokens // self.block_size : sequence.published]:
            self.pool.withdraw(block)

    def check(self) -> None:
        """Assert that blocks and sequences agree."""
        self.pool.check()
        holders = [*self.running, *self.leaving]
        used = {block for sequence in holders for block in sequence.blocks}
        assert len(used) == self.pool.active, f"{len(used)} blocks in tables, {self.pool.active} active"
        assert not any(sequence.blocks for sequence in self.waiting), "a waiting sequence holds blocks"
        slots = sorted([*self._free_slots, *(s.slot for s in holders if s.slot is not None)])
        assert slots == list(range(len(slots))), f"slots are lost or given twice: {slots}"

    # ---- running sequences ----

    def _schedule_answers(self, plan: Plan) -> list[Sequence]:
        """A token of each running answer; what runs besides, by rank, are prompts. The budget is never short here: a
        step has at least as many tokens as there are slots."""
        prompts = []
        for sequence in self.running.copy():
            computed, total = sequence.computed, sequence.total
            if total >= sequence.limit:
                continue
            if total - computed > 1:
                prompts.append(sequence)
            elif sequence.slot is not None and (
                total <= len(sequence.blocks) * self.block_size or self._make_room(sequence, total, plan)
            ):
                plan.rows.append(Row(sequence, computed, 1, True))
                sequence.computed = total
                sequence.total = total + 1
        plan.budget = self.step_tokens - len(plan.rows)
        return prompts

    def _schedule(self, sequence: Sequence, remaining: int, plan: Plan) -> None:
        tokens = remaining if remaining <= plan.budget else plan.budget
        if tokens == 0:
            return
        end = sequence.computed + tokens
        if end > len(sequence.blocks) * self.block_size and not self._make_room(sequence, end, plan):
            return
        samples = tokens == remaining
        plan.rows.append(Row(sequence, end - tokens, tokens, samples))
        plan.budget -= tokens
        sequence.computed = end
        sequence.total += samples

    def _make_room(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        """Give it blocks for so many tokens, pausing others if need be. False when it had to be paused itself."""
        needed = sequence.blocks_for(tokens) - len(sequence.blocks)
        if needed <= 0:
            return True
        while self.pool.available < needed:
            victim = max((s for s in self.running if s.preemptions < MOST_PREEMPTIONS), key=_rank)
            self._preempt(victim)
            plan.drop(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.take(needed)
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Pause: its blocks go (computed whole ones stay findable as long as there is room), prefill brings it back."""
        self.running.remove(victim)
        self._vacate(victim)
        victim.total = len(victim.tokens)
        victim.preemptions += 1
        self.preemptions += 1
        self.add(victim)

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.slot is not None, "it has no slot"
        for key in [key for key, owner in self._computing.items() if owner is sequence]:
            del self._computing[key]
        self.pool.release(sequence.blocks)
        self._free_slots.append(sequence.slot)
        self._released.append(sequence.slot)
        sequence.slot, sequence.blocks = None, []
        sequence.computed = sequence.published = sequence.told_blocks = 0

    # ---- waiting sequences ----

    def _admit(self, plan: Plan) -> None:
        """By rank. Who waits for a prefix, fetched or computed by another, lets others pass; who waits for room not."""
        for sequence in list(self.waiting):
            if not self._free_slots or plan.budget == 0:
                return
            if sequence.parked:
                continue
            usable = self.usable_blocks(sequence)
            found = self.pool.match(map(sequence.key, range(usable)))
            if len(found) < usable and self.is_computing(sequence.key(len(found))):
                continue
            protected = sequence.preemptions >= MOST_PREEMPTIONS
            blocks = sequence.most_blocks if protected else sequence.blocks_for(sequence.total)
            if self.pool.available - self.pool.idle(found) < blocks - len(found):
                return
            self._start(sequence, found, usable)
            sequence.blocks += self.pool.take(blocks - len(found))
            plan.admitted.append(sequence)
            self._schedule(sequence, sequence.remaining, plan)

    def _start(self, sequence: Sequence, found: list[int], usable: int) -> None:
        self.pool.share(found)
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_rank)
        sequence.slot = self._free_slots.pop()
        sequence.blocks = found
        sequence.published = len(found)
        sequence.computed = sequence.found_tokens = len(found) * self.block_size
        sequence.prefill_end = sequence.total
        if not sequence.preemptions:
            fetched = sum(key in sequence.fetched for key in sequence.keys(len(found))) if sequence.fetched else 0
            sequence.fetched_tokens = fetched * self.block_size
            sequence.cached_tokens = sequence.found_tokens - sequence.fetched_tokens
        self._begun.append((sequence, usable))

    def _note_begun(self) -> None:
        for sequence, usable in self._begun:
            if sequence.slot is not None:
                for key in sequence.keys(usable)[sequence.published :]:
                    self._computing.setdefault(key, sequence)
        self._begun.clear()

    def caches(self, sequence: Sequence) -> bool:
        """Whether it may find and fill cached blocks."""
        return self.prefix_cache and not sequence.job.bypass_cache
