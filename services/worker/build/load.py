"""From settings to a model that can be served: its engine, its card and its tokenizer. Knows checkpoints, no mesh."""

from dataclasses import dataclass

import structlog

from protos import mesh_pb2 as mesh
from services.worker.build.choose import build_engine, resolve_engine
from services.worker.engine.base import Engine
from services.worker.loader import checkpoint, presets
from services.worker.options import Progress
from services.worker.settings import WorkerSettings

log = structlog.get_logger("worker")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to be served."""

    engine: Engine
    card: mesh.ModelCard
    bundle: bytes
    """What gateways need to turn text into tokens."""
    max_batch_size: int


def load_model(settings: WorkerSettings, name: str, progress: Progress) -> LoadedModel:
    """Load the model of these settings, which requests will call `name`. Takes seconds to minutes.

    Raises CheckpointError.
    """
    settings = resolve_engine(settings)
    folder = checkpoint.locate(settings.model)
    with checkpoint.start_hashing(folder) as digests:
        bundle, digest = checkpoint.serialize(checkpoint.read_bundle(folder))
        built = build_engine(folder, settings, progress, compile_ahead=True)
        progress("fingerprint", 0, 1)
        fingerprint = checkpoint.fingerprint(digests, *settings.numerics.fingerprint_parts())
        progress("fingerprint", 1, 1)
    built.engine.use_fingerprint(fingerprint)
    presets.remove_folders()
    memory = built.engine.memory
    log.info(
        "loaded",
        parameters=built.parameters,
        memory=str(memory),
        kv_tokens=memory.kv_tokens,
        max_concurrency=round(memory.concurrency, 1),
    )
    card = checkpoint.model_card(
        folder,
        built.config,
        name=name,
        context_length=memory.max_seq_length,
        block_size=settings.block_size,
        parameters=built.parameters,
    )
    card.aliases.extend(settings.aliases)
    card.fingerprint, card.bundle_digest = fingerprint, digest
    return LoadedModel(built.engine, card, bundle, settings.max_batch_size)


def abandon() -> None:
    """Remove the temporary files of a model that is being loaded, before the process ends."""
    presets.remove_folders()
