"""From settings to a model that can be served: its engine, its card and its tokenizer. Knows checkpoints, no mesh."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from protos import mesh_pb2 as mesh
from services.worker.build import refused
from services.worker.build.adapters import AdapterReader, adapter_reader
from services.worker.build.choose import build_engine, resolve_engine
from services.worker.engine.base import Engine
from services.worker.errors import CheckpointError
from services.worker.job import Adapter
from services.worker.kvcache.shared_memory import SharedMemory
from services.worker.loader import checkpoint, presets
from services.worker.loader.config import load_config
from services.worker.loader.sentence_folder import is_text_model
from services.worker.options import ADAPTER_NAME, DEFAULT_SLOTS, Progress
from services.worker.settings import WorkerSettings
from services.worker.structured.compiler import GuidanceForms

if TYPE_CHECKING:
    from services.worker.build.encoders.assemble import BuiltEncoder

log = structlog.get_logger("worker")

_QUEUED_BATCHES = 2
"""Jobs that an encoder takes, in batches of one text each: the next batch is there when the last one is computed."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to be served."""

    engine: Engine
    card: mesh.ModelCard
    bundle: bytes
    """What gateways need to turn text into tokens."""
    max_batch_size: int
    read_adapter: AdapterReader
    adapters: tuple[Adapter, ...]
    """Those that are served from the start."""
    shared_memory: SharedMemory | None = None
    """The memory of the engine's blocks, for other processes of this host; None: it is not shared."""


def load_model(settings: WorkerSettings, name: str, progress: Progress) -> LoadedModel:
    """Load the model of these settings, which requests will call `name`. Takes seconds to minutes.

    Raises CheckpointError.
    """
    folder = checkpoint.locate(settings.model)
    if is_text_model(folder):
        if settings.settings_shared:
            settings = refused.without_decoders(settings)
        return _load_encoder(folder, resolve_engine(settings, folder, encodes=True), name, progress)
    load_config(folder)  # A wrong one is refused before torch is imported, which takes seconds.
    if settings.adapters and settings.adapter_slots is None:
        settings = settings.model_copy(update={"adapter_slots": DEFAULT_SLOTS})
    settings = resolve_engine(settings, folder)
    with checkpoint.start_hashing(folder, settings.engine) as digests:
        files = checkpoint.read_bundle(folder)
        bundle, digest = checkpoint.serialize(files)
        built = build_engine(folder, settings, progress, compile_ahead=True)
        progress("fingerprint", 0, 1)
        fingerprint = checkpoint.fingerprint(digests, *settings.numerics.fingerprint_parts())
        progress("fingerprint", 1, 1)
    built.engine.use_fingerprint(fingerprint)
    built.engine.use_forms(GuidanceForms(files.tokenizer_json, built.config.vocab_size, built.config.eos_token_ids))
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
    card.engine = settings.engine
    card.fingerprint, card.bundle_digest = fingerprint, digest
    adapters = _read_adapters(built.read_adapter, settings)
    shared = built.shared_memory if settings.device_fetch else None
    return LoadedModel(built.engine, card, bundle, settings.max_batch_size, built.read_adapter, adapters, shared)


def _read_adapters(read: AdapterReader, settings: WorkerSettings) -> tuple[Adapter, ...]:
    """The adapters of the start. Raises CheckpointError."""
    names = [given.partition("=")[0] for given in settings.adapters]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise CheckpointError(f"WEFT_ADAPTERS: {twice} is there twice, but a name is that of one adapter")
    if len(names) > settings.most_adapters:
        limit = f"the limit is {settings.most_adapters} (MAX_CPU_LORAS)"
        raise CheckpointError(f"WEFT_ADAPTERS: {len(names)} adapters are too many: {limit}")
    return tuple(_adapter(read, each) for each in settings.adapters)


def _adapter(read: AdapterReader, given: str) -> Adapter:
    """NAME=FOLDER as an adapter of the start. Raises CheckpointError, which names it."""
    name, _, place = given.partition("=")
    if not re.fullmatch(ADAPTER_NAME, name) or not place:
        raise CheckpointError(f"WEFT_ADAPTERS: {given} is not NAME=FOLDER with a name of A-Z a-z 0-9 . _ -")
    try:
        return read(name, place)
    except CheckpointError as error:
        raise CheckpointError(f"adapter {name}: {error}") from None


def _load_encoder(folder: Path, settings: WorkerSettings, name: str, progress: Progress) -> LoadedModel:
    """The same for an encoder. Raises CheckpointError."""
    from services.worker.build.encoders.assemble import build_encoder

    with checkpoint.start_hashing(folder, settings.engine) as digests:
        bundle, digest = checkpoint.serialize(checkpoint.read_bundle(folder))
        built = build_encoder(folder, settings, progress)
        parts = (*settings.numerics.fingerprint_parts(), repr(built.settings), str(built.most_length))
        fingerprint = checkpoint.fingerprint(digests, *parts)
    presets.remove_folders()
    log.info("loaded", parameters=built.parameters, tasks=sorted(built.engine.capabilities))
    card = mesh.ModelCard(
        name=name,
        aliases=settings.aliases,
        architecture=built.config.architecture,
        fingerprint=fingerprint,
        context_length=built.most_length,
        vocab_size=built.config.vocab_size,
        parameters=built.parameters,
        block_size=settings.block_size,
        bundle_digest=digest,
        engine=built.computed_by,
        encoder=_encoder_card(built),
    )
    credits = _QUEUED_BATCHES * settings.max_batch_size
    read = adapter_reader(None, 0)
    return LoadedModel(built.engine, card, bundle, credits, read, _read_adapters(read, settings))


def _encoder_card(built: "BuiltEncoder") -> mesh.EncoderCard:
    settings, head = built.settings, built.config.head
    return mesh.EncoderCard(
        tasks=sorted(built.engine.capabilities),
        width=built.engine.runner.width,
        normalizes=settings.normalizes,
        prompts=settings.prompts,
        default_prompt=settings.default_prompt,
        dimensions=[size for size in built.dimensions if size],
        any_dimensions=0 in built.dimensions,
        lowercase=settings.lowercase,
        labels=head.labels if head is not None else (),
    )


def abandon() -> None:
    """Remove the temporary files of a model that is being loaded, before the process ends."""
    presets.remove_folders()
