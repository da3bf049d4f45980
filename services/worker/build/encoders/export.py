"""Makes of an encoder's checkpoint a graph that other runtimes compute. Knows exporters, no files of theirs."""

import torch
from torch.export import Dim, ExportedProgram

from services.worker.build.encoders.source import EncoderSource
from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions, Progress
from services.worker.runners.runtime.quiet import quiet
from services.worker.runners.runtime.text_network import DenseTextOps, TextNetwork

_PLAIN = EngineOptions(engine="torch")


def load_network(source: EncoderSource, progress: Progress) -> tuple[TextNetwork, int]:
    """A checkpoint's encoder as a function, in float32, and the numbers in the checkpoint. Raises CheckpointError."""
    encoder, parameters = source.load(DenseTextOps(), _PLAIN, progress)
    return TextNetwork(encoder).eval(), parameters


def trace(network: TextNetwork) -> ExportedProgram:
    """The network as a graph, in which texts and tokens may be of any number."""
    config = network.encoder.config
    batch, length = Dim("batch"), Dim("length", max=config.context_length)
    example = torch.ones(2, 3, dtype=torch.int64)
    inputs = [example.clone() for _ in range(3 if config.segments > 1 else 2)]
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(network, tuple(inputs), dynamic_shapes=[{0: batch, 1: length} for _ in inputs])
    except Exception as error:  # Torch raises many kinds, all of them over what the network computes.
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{config.architecture} cannot be exported: {reason}") from None
