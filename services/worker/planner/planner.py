"""Chooses which sequences take part in the next step, with how many tokens, and which ones wait or make room.

Pure: knows sequences and blocks, never tensors, threads or the clock. It needs no token's value to plan the next step.
"""

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from operator import attrgetter

from services.worker.job import Adapter
from services.worker.planner.adapter_slots import AdapterSlots
from services.worker.planner.block_pool import BlockPool
from services.worker.planner.sequence import Sequence
from services.worker.planner.token_budget import TokenBudget

# A sequence that was paused this often is not paused again: when it is admitted again it takes all blocks that it can
# ever need.
MOST_PREEMPTIONS = 3

_queue_key = attrgetter("queue_key")


@dataclass(slots=True)
class Row:
    """A sequence's part in a step."""

    sequence: Sequence
    start: int
    """Index of its first token in the sequence."""
    tokens: int
    """Tokens to compute."""
    samples: int
    """Tokens at the row's end after which a new one is drawn: none if the row ends before the sequence's last token;
    otherwise that one and the guesses."""
    guesses: Many[int] = ()
    """Tokens that may follow the last one. They are part of the row."""


Guesser = Callable[[list[tuple[Sequence, int]], int], list[Many[int]]]
"""Answers of a step, how many guesses each has room for at most, and the rows of the step -> the guesses for each."""


@dataclass(slots=True)
class Plan:
    """One step."""

    budget: int
    """Tokens that may still be added."""
    rows: list[Row] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that got a slot in this step."""
    released: Many[int] = ()
    """Slots that became empty since the last step. An admitted sequence may have got one of them."""
    paused: list[Sequence] = field(default_factory=list)
    """Sequences that lost slot and blocks to make room for others."""
    loads: Many[tuple[int, Adapter]] = ()
    """Adapters that are to be loaded, and the slots for them."""

    def drop(self, sequence: Sequence) -> None:
        """Take the sequence's row out of the step."""
        self.budget += sum(row.tokens for row in self.rows if row.sequence is sequence)
        self.rows = [row for row in self.rows if row.sequence is not sequence]


class Planner:
    """Waiting and running sequences and the pool they share. Only the engine's thread may call it."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        slots: int,
        step_tokens: int,
        prefix_cache: bool,
        chunk_tokens: int | None = None,
        guesses_behind: int = 0,
        adapter_slots: int = 0,
        stages: int = 1,
    ) -> None:
        """guesses_behind: guesses of an answer, at most, that may be made behind a step for the next one; then a step
        has none beside prompts. adapter_slots: adapters that device memory holds. stages: of a pipeline, whose steps in
        flight share the answers: the first stage needs the value of an answer's last token."""
        if step_tokens < slots:
            raise ValueError(f"step_tokens {step_tokens} is less than max_batch_size {slots}: some rows would starve")
        self.pool, self.block_size = pool, block_size
        self.step_tokens, self.prefix_cache = step_tokens, prefix_cache
        self._guesses_behind, self._stages = guesses_behind, stages
        self._token_budget = None if chunk_tokens is None else TokenBudget(chunk_tokens, step_tokens)
        self.adapters = AdapterSlots(adapter_slots)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        """Sequences that have ended while a step in flight may still write to their blocks."""
        self.preemptions = 0
        self._launched = self._landed = 0
        """Steps so far."""
        self._free_slots = list(range(slots - 1, -1, -1))
        self._released: list[int] = []
        self._whole: list[tuple[Sequence, int]] = []
        """Sequences, and how many of their first blocks are whole: some of these are still to be published."""
        self._computing: dict[bytes, Sequence] = {}
        self._begun: list[tuple[Sequence, int]] = []
        """Sequences, and how many of their first blocks are still to be entered in `_computing`. Computing their keys
        can wait until the step is launched."""

    def fits(self, sequence: Sequence) -> bool:
        """Whether the sequence can run when it is alone."""
        return sequence.most_blocks <= self.pool.total

    def add(self, sequence: Sequence) -> None:
        """Put the sequence into the waiting queue."""
        bisect.insort(self.waiting, sequence, key=_queue_key)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended. Its slot and blocks become free at once, or when the last step in flight
        that may still write to them is over."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if self.in_flight(sequence):
            self.leaving.append(sequence)
        else:
            self._vacate(sequence)

    def launched(self, rows: Iterable[Row]) -> None:
        """Note that a step with these rows is in flight."""
        self._launched = number = self._launched + 1
        for row in rows:
            row.sequence.last_step = number

    def landed(self) -> None:
        """Note that the oldest step in flight is over."""
        self._landed += 1
        if self.leaving:
            leaving, self.leaving = self.leaving, []
            for sequence in leaving:
                if self.in_flight(sequence):
                    self.leaving.append(sequence)
                else:
                    self._vacate(sequence)

    def in_flight(self, sequence: Sequence) -> bool:
        """Whether a step in flight has a row of the sequence."""
        return sequence.last_step > self._landed

    def plan(self, guesser: Guesser | None = None) -> Plan:
        """Choose the rows of the next step within the token budget: running answers, then prompts, then new ones.

        guesser: is asked how the answers whose tokens are all known may continue.
        """
        self.publish()
        if self._begun:
            self._note_begun()
        plan = Plan(self.step_tokens)
        before = self.preemptions
        prompts = self._schedule_answers(plan)
        if guesser is not None and self.may_guess():
            self._add_guesses(plan, guesser)
        if plan.rows and self._token_budget is not None:
            answers = len(plan.rows)
            queue = [*prompts, *self.waiting[: len(self._free_slots)]]
            begun = sum(len(row.sequence.tokens) > row.sequence.prefill_end for row in plan.rows) if queue else 0
            context = prompts[0].computed if prompts else 0
            share = self._token_budget.step([sequence.arrival for sequence in queue], context, answers, begun)
            plan.budget = min(plan.budget, max(share - answers, 0))
        for sequence in prompts:
            if sequence.slot is not None:
                self._schedule(sequence, sequence.remaining, plan)
        if self.waiting and self.preemptions == before:
            self._admit(plan)
            plan.loads = self.adapters.take_loads()
        if plan.rows:  # Otherwise no step is launched that could carry the edits.
            plan.released, self._released = self._released, []
        return plan

    def may_guess(self) -> bool:
        """Whether the next step may have guesses."""
        if not self._guesses_behind:
            return True
        return not self.waiting and all(
            sequence.computed >= sequence.prefill_end and sequence.guessable for sequence in self.running
        )

    def commit(self, row: Row, tokens: Collection[int] = ()) -> None:
        """Record that a row is computed and, if it samples, which tokens it drew. Its whole blocks can be found once
        `publish` is called.

        A plan counts on one token for each row that samples. Of a row that drew several, the device has computed all
        but the last; of one that drew none, the last token is computed again.
        """
        sequence = row.sequence
        end = row.start + row.tokens - len(row.guesses)
        sequence.tokens += tokens
        if row.samples and len(tokens) != 1:
            beyond = len(tokens) - 1
            sequence.computed += beyond
            sequence.total += beyond
            end = min(end + beyond, len(sequence.blocks) * self.block_size)
        known = len(sequence.tokens)
        whole = (end if end < known else known) // self.block_size
        if whole > sequence.published and sequence.slot is not None and self.caches(sequence):
            self._whole.append((sequence, whole))

    def publish(self) -> None:
        """Let the whole blocks of the rows that were committed be found. Computing their keys takes time, for which no
        token need wait."""
        for sequence, whole in self._whole:
            for index, key in enumerate(sequence.keys.between(sequence.published, whole), sequence.published):
                self.pool.publish(sequence.blocks[index], key)
                if self._computing.get(key) is sequence:
                    del self._computing[key]
            sequence.published = whole
        self._whole.clear()

    def hold(self, sequence: Sequence) -> None:
        """Do not admit this waiting sequence: blocks are being fetched for it."""
        sequence.waiting_for_blocks = True

    def resume(self, sequence: Sequence) -> None:
        """The sequence may be admitted again."""
        sequence.waiting_for_blocks = False

    def note_fetched(self, sequence: Sequence, keys: Iterable[bytes]) -> None:
        """Record that the blocks of these keys were fetched for this sequence."""
        sequence.fetched_keys.update(keys)

    def usable_blocks(self, sequence: Sequence) -> int:
        """How many blocks the sequence may find in the cache: whole ones before its last token, which is always
        computed. None if the log-probabilities of its prompt are asked for: a block that is found shows none."""
        if sequence.job.params.prompt_logprobs is not None:
            return 0
        return (len(sequence.tokens) - 1) // self.block_size if self.caches(sequence) else 0

    def usable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of these blocks."""
        return sequence.keys.first(self.usable_blocks(sequence))

    def is_computing(self, key: bytes) -> bool:
        """Whether a running sequence is about to publish this block."""
        self._note_begun()
        return key in self._computing

    def computing(self, keys: Many[bytes], rows: Iterable[Row]) -> list[int]:
        """The blocks that a step with these rows makes whole, for the first of these keys of one prompt. No earlier
        step is in flight."""
        self._note_begun()
        sequence = self._computing.get(keys[0]) if keys else None
        row = next((row for row in rows if row.sequence is sequence), None)
        if sequence is None or row is None:
            return []
        first = sequence.keys.index(keys[0])
        blocks = sequence.blocks[first : (row.start + row.tokens) // self.block_size]
        same = (key == sequence.keys.at(index) for index, key in enumerate(keys[: len(blocks)], first))
        return blocks[: sum(itertools.takewhile(bool, same))]

    def cut(self, sequence: Sequence, tokens: int) -> None:
        """Withdraw the blocks beyond the sequence's first `tokens` tokens from the cache."""
        self.publish()
        for block in sequence.blocks[tokens // self.block_size : sequence.published]:
            self.pool.withdraw(block)

    def check(self, lent: Iterable[int] = ()) -> None:
        """Assert that blocks and sequences agree. lent: blocks that other workers copy."""
        self.pool.check()
        holders = [*self.running, *self.leaving]
        used = {block for sequence in holders for block in sequence.blocks}.union(lent)
        assert len(used) == self.pool.active, f"{len(used)} blocks in tables, {self.pool.active} active"
        assert not any(sequence.blocks for sequence in self.waiting), "a waiting sequence holds blocks"
        slots = sorted([*self._free_slots, *(s.slot for s in holders if s.slot is not None)])
        assert slots == list(range(len(slots))), f"slots are lost or given twice: {slots}"
        self.adapters.check(s.job.adapter.fingerprint for s in holders if s.job.adapter is not None)

    # ---- running sequences ----

    def _schedule_answers(self, plan: Plan) -> list[Sequence]:
        """Add a token of each running answer. -> the running prompts, in the queue's order. The budget suffices: a step
        has at least as many tokens as there are slots."""
        prompts, most = [], self._most_answers() if self._stages > 1 else 0
        for sequence in self.running.copy():
            computed, total = sequence.computed, sequence.total
            if total >= sequence.limit:
                continue
            if total - computed > 1:
                prompts.append(sequence)
            elif self._stages > 1 and (len(plan.rows) >= most or self.in_flight(sequence)):
                continue
            elif sequence.slot is not None and (
                total <= len(sequence.blocks) * self.block_size or self._make_room(sequence, total, plan)
            ):
                plan.rows.append(Row(sequence, computed, 1, 1))
                sequence.computed = total
                sequence.total = total + 1
        plan.budget = self.step_tokens - len(plan.rows)
        return prompts

    def _most_answers(self) -> int:
        """Answers of a step of a pipeline: each step in flight has an equal part of them."""
        answers = sum(sequence.total - sequence.computed == 1 for sequence in self.running)
        return -(-answers // self._stages)

    def _schedule(self, sequence: Sequence, remaining: int, plan: Plan) -> None:
        tokens = remaining if remaining <= plan.budget else plan.budget
        if tokens == 0:
            return
        end = sequence.computed + tokens
        if end > len(sequence.blocks) * self.block_size and not self._make_room(sequence, end, plan):
            return
        samples = int(tokens == remaining)
        plan.rows.append(Row(sequence, end - tokens, tokens, samples))
        plan.budget -= tokens
        sequence.computed = end
        sequence.total += samples

    def _add_guesses(self, plan: Plan, guesser: Guesser) -> None:
        """Lengthen rows of answers by guesses, as far as free blocks and the budget reach; no sequence pauses for them.
        A plan counts on one token of such a row, as of any other; blocks for guesses stay with their sequence."""
        places, asked = [], []
        for place, row in enumerate(plan.rows):
            sequence = row.sequence
            known = len(sequence.tokens) == sequence.total - 1 and not self.in_flight(sequence)
            if known and row.start >= sequence.prefill_end and sequence.total < sequence.limit:
                places.append(place)
                asked.append((sequence, sequence.limit - sequence.total))
        spare = self.pool.available - len(self.running)  # Their next tokens need blocks too.
        found = guesser(asked, len(plan.rows)) if asked else []
        for place, (sequence, _), guesses in zip(places, asked, found, strict=True):
            room = (len(sequence.blocks) + max(spare, 0)) * self.block_size - sequence.computed
            guesses = guesses[: max(min(room, plan.budget), 0)]
            if not guesses:
                continue
            end = sequence.computed + len(guesses)
            needed = sequence.blocks_for(end) - len(sequence.blocks)
            if self._guesses_behind:
                next_end = min(end + self._guesses_behind, max(end, sequence.limit))
                needed = max(needed, min(sequence.blocks_for(next_end) - len(sequence.blocks), spare))
            if needed > 0:
                sequence.blocks += self.pool.take(needed)
                spare -= needed
            plan.budget -= len(guesses)
            row = plan.rows[place]
            plan.rows[place] = Row(sequence, row.start, 1 + len(guesses), 1 + len(guesses), guesses)

    def _make_room(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        """Give the sequence blocks for `tokens` tokens, pausing others if need be. False when it was paused itself."""
        needed = sequence.blocks_for(tokens) - len(sequence.blocks)
        if needed <= 0:
            return True
        while self.pool.available < needed:
            victim = max((s for s in self.running if s.preemptions < MOST_PREEMPTIONS), key=_queue_key)
            self._preempt(victim)
            plan.drop(victim)
            plan.paused.append(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.take(needed)
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Take slot and blocks away. Whole blocks that are computed stay in the cache as long as there is room; a
        prefill computes the rest again."""
        self.running.remove(victim)
        self._vacate(victim)
        victim.total = len(victim.tokens)
        victim.preemptions += 1
        self.preemptions += 1
        self.add(victim)

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.slot is not None, f"job {sequence.job.key} has no slot"
        self.publish()
        for key in [key for key, owner in self._computing.items() if owner is sequence]:
            del self._computing[key]
        self.pool.release(sequence.blocks)
        if sequence.job.adapter is not None:
            self.adapters.release(sequence.job.adapter)
        self._free_slots.append(sequence.slot)
        self._released.append(sequence.slot)
        sequence.slot, sequence.blocks = None, []
        sequence.computed = sequence.published = sequence.sent_blocks = 0

    # ---- waiting sequences ----

    def _admit(self, plan: Plan) -> None:
        """Admit waiting sequences in the queue's order. One whose prefix is being fetched, or computed by another, or
        whose adapter is being loaded, lets others pass; one for which there is no room does not. One for whose adapter
        there is no room lets those pass that have none."""
        adapters_full = False
        for sequence in list(self.waiting):
            if not self._free_slots or plan.budget == 0:
                return
            adapter = sequence.job.adapter
            if sequence.waiting_for_blocks or (adapter is not None and adapters_full):
                continue
            if adapter is not None and not self.adapters.is_ready(adapter):
                adapters_full = not self.adapters.request(adapter)
                continue
            usable = self.usable_blocks(sequence)
            found = self.pool.match(map(sequence.keys.at, range(usable)))
            if len(found) < usable and self.is_computing(sequence.keys.at(len(found))):
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
        bisect.insort(self.running, sequence, key=_queue_key)
        sequence.slot = self._free_slots.pop()
        sequence.adapter_slot = 0 if sequence.job.adapter is None else self.adapters.use(sequence.job.adapter)
        sequence.blocks = found
        sequence.published = len(found)
        sequence.computed = sequence.found_tokens = len(found) * self.block_size
        sequence.prefill_end = sequence.total
        if not sequence.preemptions:
            if sequence.fetched_keys:
                fetched = sum(key in sequence.fetched_keys for key in sequence.keys.first(len(found)))
                sequence.fetched_tokens = fetched * self.block_size
            sequence.cached_tokens = sequence.found_tokens - sequence.fetched_tokens
        self._begun.append((sequence, usable))

    def _note_begun(self) -> None:
        for sequence, usable in self._begun:
            if sequence.slot is not None:
                for key in sequence.keys.between(sequence.published, usable):
                    self._computing.setdefault(key, sequence)
        self._begun.clear()

    def caches(self, sequence: Sequence) -> bool:
        """Whether the sequence may find and fill cached blocks."""
        return self.prefix_cache and not sequence.job.bypass_cache
