"""Reads the folder of an encoder, and loads its weights into a network. Knows files and memory, no engine, no job."""

from dataclasses import dataclass
from pathlib import Path

from services.host import available_memory
from services.worker.build import memory
from services.worker.build.weights import dtype_of, free_gpu_bytes
from services.worker.errors import CheckpointError
from services.worker.loader import presets
from services.worker.loader.files import _read_json
from services.worker.loader.formats.registry import RoundedWeights, WeightReader, reader_of
from services.worker.loader.plain import load_weights, pack_weights, randomize
from services.worker.loader.quantized import load_quantized, randomize_quantized
from services.worker.loader.sentence_folder import SentenceSettings, read_sentence_settings
from services.worker.loader.tensors import Checkpoint, open_checkpoint
from services.worker.models.encoders.config import EncoderConfig
from services.worker.models.encoders.encoder import Encoder
from services.worker.models.encoders.family import EncoderFamily
from services.worker.models.encoders.ops import EncoderOps
from services.worker.models.encoders.registry import ENCODERS, encoder_family
from services.worker.models.raw_config import RawConfig
from services.worker.options import EngineOptions, Progress


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """The folder of an encoder: all that it states but its weights."""

    folder: Path
    raw: RawConfig
    family: EncoderFamily
    config: EncoderConfig
    settings: SentenceSettings

    def load(self, ops: EncoderOps, options: EngineOptions, progress: Progress) -> tuple[Encoder, int]:
        """The network with its weights on the options' device, and the numbers in the checkpoint, 0 if they are random.
        Raises CheckpointError."""
        reader = reader_of(self.raw.section("quantization_config").values or None, options.quantize)
        checkpoint = self._open()
        if checkpoint is not None:
            # About the bytes that the weights take, without what rounding saves.
            expected = checkpoint.parameters * dtype_of(options).itemsize
            memory.check_weights(expected, free_bytes(options), options)
        dtype, device = dtype_of(options), "cuda" if options.on_gpu else "cpu"
        pooling, meta = self.settings.pooling, reader is not None
        model = Encoder(self.config, self.family, ops, dtype, pooling, device, meta_linears=meta)
        _load(model, checkpoint, reader, progress)
        return model, checkpoint.parameters if checkpoint is not None else 0

    def _open(self) -> Checkpoint | None:
        """None: the weights are random."""
        if presets.is_random(self.folder):
            return None
        scores, family = self.config.head is not None, self.family
        return open_checkpoint(self.folder).renamed(family.tensor_name if scores else family.tensor_name_without_head)


def read_raw(folder: Path) -> RawConfig:
    """config.json of a folder. Raises CheckpointError."""
    return RawConfig(_read_json(folder / "config.json"))


def supported() -> str:
    """The architectures of encoders, for messages."""
    return ", ".join(name for each in ENCODERS for name in each.architectures)


def free_bytes(options: EngineOptions) -> int:
    """Free memory of the options' device."""
    return free_gpu_bytes() if options.on_gpu else available_memory()


def read_source(folder: Path, raw: RawConfig) -> EncoderSource:
    """Read the JSON files of an encoder's folder beside its config.json. Raises CheckpointError."""
    family = encoder_family(raw.architecture)
    if family is None:
        raise CheckpointError(f"{raw.architecture} is no encoder; encoders are {supported()}")
    return EncoderSource(folder, raw, family, family.read_config(raw), read_sentence_settings(folder))


def _load(model: Encoder, checkpoint: Checkpoint | None, reader: WeightReader | None, progress: Progress) -> None:
    if checkpoint is not None and reader is not None:
        load_quantized(model, checkpoint, reader, progress)
    elif checkpoint is not None:
        load_weights(model, checkpoint, progress)
    elif isinstance(reader, RoundedWeights):
        randomize_quantized(model, reader, progress)
    else:
        randomize(model, progress)
    pack_weights(model)
