"""A checkpoint's decoder, compiled by torch.compile for sizes of any number. Knows the compiler, no slots.

Knows neither files nor how long compiling takes: the first calls compile.
"""

import os
import shutil

import torch

from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig
from services.worker.runners.runtime.network import NetworkSession, PastDecoder
from services.worker.runners.runtime.past import PastGroup, PastShape, empty_buffer
from services.worker.runners.runtime.runner import make_call


class CompiledSession(NetworkSession):
    """A `DecoderSession` of a network in memory."""

    def __init__(self, network: PastDecoder, config: ModelConfig) -> None:
        """Raises CheckpointError if there is no C++ compiler."""
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            raise CheckpointError("ENGINE=compile needs a C++ compiler: install g++, or name one in CXX")
        super().__init__(torch.compile(network, dynamic=True))
        dtype = network.decoder.embedding.dtype
        self.shape = PastShape(config.layers, config.kv_heads, config.head_dim, dtype)

    def compile(self) -> None:
        """Compute prompts without and with a past, and steps of one row and of several: each kind of sizes is compiled
        once, in seconds to minutes."""
        with torch.inference_mode():
            for rows, tokens, past in ((1, 4, 0), (1, 4, 8), (1, 1, 8), (2, 1, 8), (3, 1, 70)):
                group = PastGroup(tuple(range(rows)), empty_buffer(self.shape, rows, past + tokens))
                ids, stored = torch.zeros(rows, tokens, dtype=torch.int64), torch.full((rows,), past)
                self.compute(make_call(group, ids.numpy(), stored.numpy(), [0] * rows))
