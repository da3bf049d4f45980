"""Sends a step to the GPU: its words and edits in one copy, then a kernel that applies the edits to the slots.

The first token of a prompt waits for this, so copy and kernel are one small graph. Knows words, never jobs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.slot_settings import SlotSettings
from kernels.slot_edits import HEADER, edit_slots
from services.worker.runners.cuda.step_words import StagingBuffer, put
from services.worker.runners.step import EDIT_WORDS, Words

ROOM = 1 << 14
"""Most words of edits that are sent with a step; new blocks take one for each 16 tokens."""
STAGING_BUFFERS = 4
"""Host buffers: one for each step in flight, and for steps whose copies may not be over yet."""
_CAPTURED_WORDS = 1 << 12
"""Words copied by the captured graphs: most words of the steps that they serve."""


@dataclass(slots=True)
class DeviceEdits:
    """The packed edits of a step that the device reads, and the indices in `words` at which they begin."""

    words: Words
    blocks: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks) + len(self.admitted)

    def lay_out(self, into: StagingBuffer, at: int) -> int:
        """Write them from index `at` on, and their indices to the beginning of the buffer. -> the index after them."""
        after = at + len(self)
        end = after + len(self.words)
        put(into, 0, (len(self.blocks), len(self.admitted), at))
        put(into, at, self.blocks + self.admitted)
        into[after:end] = self.words.data
        return end

    @property
    def fits(self) -> bool:
        """Whether they take at most ROOM words."""
        return len(self) + len(self.words) <= ROOM

    def one_by_one(self) -> Iterator["DeviceEdits"]:
        """Each edit by itself."""
        for place in self.blocks:
            yield DeviceEdits(self._at(place), [0])
        for place in self.admitted:
            yield DeviceEdits(self._at(place), [], [0])

    def _at(self, place: int) -> Words:
        return self.words[place : place + EDIT_WORDS + int(self.words[place + EDIT_WORDS - 1])]


NO_EDITS = DeviceEdits(np.empty(0, np.int32))


class StepUpload:
    """Copies words to the device and applies edits to the tables and settings of slots, in the order of the stream."""

    def __init__(self, step_words: int, tables: Tensor, settings: SlotSettings) -> None:
        """step_words: of the largest step; tables int32 [slots, B], contiguous."""
        self._tables, self._settings = tables, settings
        # Indices of the edits, a step's words, edits. An edit that is sent by itself is a whole table at most.
        most = HEADER + step_words + max(ROOM, EDIT_WORDS + 2 + tables.shape[1])
        self._words = torch.zeros(most, dtype=torch.int32, device=tables.device)
        self._staged = [torch.zeros(most, dtype=torch.int32, pin_memory=tables.is_cuda) for _ in range(STAGING_BUFFERS)]
        self.staging_buffers: list[StagingBuffer] = [words.numpy().data for words in self._staged]
        """Host memory that words and edits are copied from. A step's words begin at index HEADER."""
        self.words = self._words[HEADER:]
        """A step's words on the device."""
        self._graphs: list[Any] = []
        self._begun = self._landed = 0
        """Steps that were begun, and how many of these are known to be over."""

    def capture(self, pool: Any) -> None:
        """Capture copy and edit of small steps, with memory from this pool of graphs."""
        self.launch_edits()  # compiles
        torch.cuda.synchronize()
        for buffer in range(STAGING_BUFFERS):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._copy(buffer, _CAPTURED_WORDS)
                self._edit()
            self._graphs.append(graph)

    def launch_edits(self) -> None:
        """Launch the kernel of edits without any, to compile it."""
        self._words.zero_()
        self._edit()

    def begin(self) -> tuple[int, int]:
        """-> the number of the next step, and the index of its staging buffer. Only after a failed step was split may
        steps in flight occupy all buffers: these are waited for, because the device may still read their words."""
        number = self._begun
        if number - self._landed >= STAGING_BUFFERS:
            self._settle()
            self._landed = number
        self._begun += 1
        return number, number % STAGING_BUFFERS

    def landed(self, number: int) -> None:
        """Note that the step of this number is over, and so are those before it."""
        self._landed = max(self._landed, number + 1)

    def send(self, buffer: int, end: int, edits: DeviceEdits) -> None:
        """Send a step's words, which end at index `end` of this staging buffer, and apply its edits."""
        if not edits:
            self._copy(buffer, end)
            return
        if not edits.fits:
            self._send_alone(edits)
            self._copy(buffer, end)
            return
        end = edits.lay_out(self.staging_buffers[buffer], end)
        if self._graphs and end <= _CAPTURED_WORDS:
            self._graphs[buffer].replay()
        else:
            self._copy(buffer, end)
            self._edit()

    def _settle(self) -> None:
        if self._words.is_cuda:
            torch.cuda.synchronize()

    def _copy(self, buffer: int, count: int) -> None:
        self._words[:count].copy_(self._staged[buffer][:count], non_blocking=True)

    def _edit(self) -> None:
        edit_slots(self._words, self._tables, self._settings)

    def _send_alone(self, edits: DeviceEdits) -> None:
        """Apply edits for which there is no room after a step's words, one by one."""
        for edit in edits.one_by_one():
            words = np.empty(HEADER + 1 + len(edit.words), np.int32)
            edit.lay_out(words.data, HEADER)
            staged = torch.from_numpy(words)
            # The allocator of pinned memory does not reuse it before the copy is over.
            staged = staged.pin_memory() if self._words.is_cuda else staged
            self._words[: len(words)].copy_(staged, non_blocking=True)
            self._edit()
