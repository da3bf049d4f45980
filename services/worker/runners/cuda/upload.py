"""A step's way to the GPU: its words and edits in one copy, then the edits of its slots: new blocks and admissions. A
prompt alone waits for this, so copy and edits are one small graph. Knows words, never jobs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.slot_settings import SlotSettings
from kernels.slot_edits import HEADER, edit_slots
from services.worker.runners.cuda.step_words import Stage, put
from services.worker.runners.step import EDIT_WORDS, Words

ROOM = 1 << 14
"""Words of edits that travel with a step; new blocks take one for 16 tokens."""
STAGES = 4
"""Host buffers: one for each step in flight, and for those whose copies may not be over yet."""
_CAPTURED_WORDS = 1 << 12
"""Of the copies that are parts of graphs: what is little is all copied."""


@dataclass(slots=True)
class DeviceEdits:
    """Those of a step's packed edits that the device reads, and in which places of the words they begin."""

    words: Words
    blocks: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks) + len(self.admitted)

    def lay_out(self, into: Stage, at: int) -> int:
        """Write them from `at` on, and where they are to the beginning. -> where they end."""
        behind = at + len(self)
        end = behind + len(self.words)
        put(into, 0, (len(self.blocks), len(self.admitted), at))
        put(into, at, self.blocks + self.admitted)
        into[behind:end] = self.words.data
        return end

    @property
    def fits(self) -> bool:
        """They take no more than ROOM."""
        return len(self) + len(self.words) <= ROOM

    def one_by_one(self) -> Iterator["DeviceEdits"]:
        """Each alone."""
        for place in self.blocks:
            yield DeviceEdits(self._at(place), [0])
        for place in self.admitted:
            yield DeviceEdits(self._at(place), [], [0])

    def _at(self, place: int) -> Words:
        return self.words[place : place + EDIT_WORDS + int(self.words[place + EDIT_WORDS - 1])]


NO_EDITS = DeviceEdits(np.empty(0, np.int32))


class StepUpload:
    """Brings words to the device and applies edits to the tables and settings of slots, in the order of the stream."""

    def __init__(self, step_words: int, tables: Tensor, settings: SlotSettings) -> None:
        """step_words: of the largest step; tables int32 [slots, B], contiguous."""
        self._tables, self._settings = tables, settings
        # Where edits are, a step's words, edits; of those that travel alone one is a whole table at most.
        most = HEADER + step_words + max(ROOM, EDIT_WORDS + 2 + tables.shape[1])
        self._words = torch.zeros(most, dtype=torch.int32, device=tables.device)
        self._staged = [torch.zeros(most, dtype=torch.int32, pin_memory=tables.is_cuda) for _ in range(STAGES)]
        self.stages: list[Stage] = [words.numpy().data for words in self._staged]
        """Host memory that words and edits are copied from; a step's words begin at HEADER."""
        self.words = self._words[HEADER:]
        """Where a step's words are on the device."""
        self._graphs: list[Any] = []
        self._begun = self._landed = 0
        """Steps, and how many of them are known to be over."""

    def capture(self, pool: Any) -> None:
        """Let small steps with edits be replays of graphs, whose memory comes from this pool."""
        self.launch_edits()  # compiles
        torch.cuda.synchronize()
        for stage in range(STAGES):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._copy(stage, _CAPTURED_WORDS)
                self._edit()
            self._graphs.append(graph)

    def launch_edits(self) -> None:
        """Apply no edits."""
        self._words.zero_()
        self._edit()

    def begin(self) -> tuple[int, int]:
        """-> the number of a step to come, and its stage. Only where steps failed and were told apart may all stages be
        taken by steps that are under way: these are waited for, since the device may still read what lies there."""
        number = self._begun
        if number - self._landed >= STAGES:
            self._settle()
            self._landed = number
        self._begun += 1
        return number, number % STAGES

    def landed(self, number: int) -> None:
        """The step of this number is over, and so are those before it."""
        self._landed = max(self._landed, number + 1)

    def send(self, stage: int, end: int, edits: DeviceEdits) -> None:
        """Send a step's words, which end there in this stage, and apply its edits."""
        if not edits:
            self._copy(stage, end)
            return
        if not edits.fits:
            self._send_alone(edits)
            self._copy(stage, end)
            return
        end = edits.lay_out(self.stages[stage], end)
        if self._graphs and end <= _CAPTURED_WORDS:
            self._graphs[stage].replay()
        else:
            self._copy(stage, end)
            self._edit()

    def _settle(self) -> None:
        if self._words.is_cuda:
            torch.cuda.synchronize()

    def _copy(self, stage: int, count: int) -> None:
        self._words[:count].copy_(self._staged[stage][:count], non_blocking=True)

    def _edit(self) -> None:
        edit_slots(self._words, self._tables, self._settings)

    def _send_alone(self, edits: DeviceEdits) -> None:
        """Apply edits for which there is no room behind a step's words."""
        for edit in edits.one_by_one():
            words = np.empty(HEADER + 1 + len(edit.words), np.int32)
            edit.lay_out(words.data, HEADER)
            staged = torch.from_numpy(words)
            # The allocator of pinned memory gives it to nobody else before the copy is over.
            staged = staged.pin_memory() if self._words.is_cuda else staged
            self._words[: len(words)].copy_(staged, non_blocking=True)
            self._edit()
