"""What other workers get of this one's blocks, also of those that the running step computes: contents, or loans.

Runs on the engine's thread. Knows rows and blocks, not who asks.
"""

from collections.abc import Callable, Sequence

from services.worker.engine.sharing.block_loans import BlockLoans
from services.worker.engine.sharing.block_reads import BlockReads
from services.worker.kvcache.pool import KvPool, LayeredPool
from services.worker.planner.planner import Planner, Row


class BlockSharing:
    """The requests of other workers for blocks. Those of `reads` and `loans` may be added from any thread."""

    def __init__(self, planner: Planner, kv: KvPool | None, wake: Callable[[], None]) -> None:
        """kv: None if blocks have no contents. wake() makes the engine call `serve`."""
        self._planner = planner
        self.reads = BlockReads(planner.pool, kv, wake, self._computing)
        self._kv = kv if isinstance(kv, LayeredPool) else None
        self.loans = BlockLoans(planner.pool, wake, self._computing, lambda: self._kv is None or self._kv.settled)
        self._rows: Sequence[Row] = ()
        self._handoffs = False
        if self._kv is not None:
            self._kv.on_layers(self._layers_computed)

    @property
    def asked(self) -> bool:
        """Whether other workers have asked for something that was not looked at."""
        return self.reads.pending or self.loans.pending

    def serve(self) -> bool:
        """Lend, and read, what is computed. -> whether there is more to read at once."""
        more = self.loans.serve()
        return self.reads.serve() or more

    def step_begins(self, rows: Sequence[Row]) -> None:
        """A step with these rows is launched, and perhaps computed at once. The launch before it may have failed."""
        self._void_parts()
        self._rows = rows

    def awaits(self, rows: Sequence[Row]) -> None:
        """The engine waits for the oldest step in flight, which computes these rows of prompts."""
        self._rows = rows
        self._handoffs = any(row.sequence.job.handoff for row in rows)

    def step_ends(self) -> None:
        """The blocks of the step are published, unless it failed."""
        self.serve()
        self._void_parts()
        self._rows = ()

    def _void_parts(self) -> None:
        self.reads.void_parts()
        self.loans.void_parts()

    def _computing(self, keys: Sequence[bytes]) -> list[int]:
        return self._planner.computing(keys, self._rows)

    def _layers_computed(self, computed: int, layers: int) -> bool:
        """As `LayersComputed`. For a prompt that is handed off others will ask soon, if they have not."""
        asked = self.loans.layers_computed(computed, layers) | self.reads.layers_computed(computed, layers)
        if self._kv is not None and self._kv.beside and self._kv.settled:
            self.serve()  # The thread would wait for the step otherwise.
        return asked or self._handoffs
