"""New blocks and admissions on their way to a GPU's slots: one copy and the replay of one small graph, since a prompt
alone waits for them. Knows words, never jobs.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.edits import HEADER, LINE, edit_slots
from kernels.sampling.slot_settings import SlotSettings
from services.worker.inputs import Words

AT_ONCE = 1024
"""New blocks of one copy; of 16 tokens each, for 16k tokens."""
_STAGES = 4


class SlotEditor:
    """Writes edits to the tables and settings of slots, in the order of the stream."""

    def __init__(self, tables: Tensor, settings: SlotSettings) -> None:
        """tables int32 [slots, B], contiguous."""
        self._tables, self._settings = tables, settings
        on_gpu = tables.device.type == "cuda"
        self._width = max(AT_ONCE, len(tables))
        most = HEADER + 2 * AT_ONCE + LINE * len(tables)
        self._words = torch.zeros(most, dtype=torch.int32, device=tables.device)
        self._staged = [torch.zeros(most, dtype=torch.int32, pin_memory=on_gpu) for _ in range(_STAGES)]
        self._lines = [words.numpy() for words in self._staged]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES)] if on_gpu else []  # type: ignore[no-untyped-call]
        self._sent = 0
        self._graph: Any = None

    def capture(self, pool: Any) -> None:
        """Let later edits be replays of a graph, whose memory comes from this pool."""
        self._words.zero_()
        self._launch(self._width)  # compiles
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._launch(self._width)

    def write(self, places: list[Words], blocks: list[Words], admitted: list[Words]) -> None:
        """Put these blocks in these places of the tables, counted from the first one's start, and these admissions,
        each a slot and the words of its state, in their slots."""
        count = sum(map(len, places))
        if count <= AT_ONCE:
            self._send(count, places, blocks, admitted)
            return
        all_places, all_blocks = np.concatenate(places), np.concatenate(blocks)
        for start in range(0, count, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            self._send(len(all_places[part]), [all_places[part]], [all_blocks[part]], admitted if start == 0 else [])

    def _send(self, count: int, places: list[Words], blocks: list[Words], lines: list[Words]) -> None:
        stage = self._sent % _STAGES
        self._sent += 1
        if self._copied:
            self._copied[stage].synchronize()
        line_words = sum(map(len, lines))
        total, header = HEADER + 2 * count + line_words, np.array((count, line_words // LINE), np.int32)
        np.concatenate((header, *places, *blocks, *lines), out=self._lines[stage][:total])
        self._words[:total].copy_(self._staged[stage][:total], non_blocking=True)
        if self._copied:
            self._copied[stage].record()
        if self._graph is None:
            self._launch(max(count, line_words // LINE, 1))
        else:
            self._graph.replay()

    def _launch(self, most: int) -> None:
        edit_slots(self._words, most, self._tables, self._settings)
