"""Reads what a sentence-transformers folder contains beside its network: pooling, normalization, prompts, longest text.

Knows JSON files, no tensor and no network. A folder without modules.json is an encoder alone: the mean of its tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kernels.operands import Pooling
from services.worker.errors import CheckpointError
from services.worker.loader.files import _read_json, parse_json, read_bounded
from services.worker.models.encoders.family import has_head
from services.worker.models.encoders.registry import encoder_family
from services.worker.models.raw_config import RawConfig
from services.worker.models.registry import causal_name

_POOLINGS: Mapping[str, Pooling] = {
    "cls": Pooling.CLS,
    "mean": Pooling.MEAN,
    "max": Pooling.MAX,
    "lasttoken": Pooling.LAST,
}
_OLD_SETTINGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_MOST_PROMPTS = 64
_LONGEST = 1 << 20
_MOST_PROMPT_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """How texts become vectors."""

    pooling: Pooling = Pooling.MEAN
    normalizes: bool = False
    """Vectors have length 1."""
    max_length: int | None = None
    """Most tokens of a text; None: the network's positions."""
    lowercase: bool = False
    """Texts are lowercased before they are tokenized."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name, what is put before a text."""
    default_prompt: str = ""
    """The name of the prompt of a request that names none; empty: there is none."""


def has_modules(folder: Path) -> bool:
    """Whether a folder describes the way from texts to vectors."""
    return (folder / "modules.json").exists()


def is_text_model(folder: Path) -> bool:
    """Whether a folder holds a model that embeds texts or scores labels, an encoder or a decoder, or claims to. Raises
    CheckpointError."""
    architecture = RawConfig(_read_json(folder / "config.json")).architecture
    scores = has_head(architecture) and causal_name(architecture) is not None
    return has_modules(folder) or scores or encoder_family(architecture) is not None


def read_sentence_settings(folder: Path) -> SentenceSettings:
    """Read the JSON files of a folder. Raises CheckpointError for what Weft does not compute, by its name."""
    tokenizer = _optional(folder, "tokenizer_config.json")
    if not has_modules(folder):
        return SentenceSettings(max_length=_read_length(tokenizer, "model_max_length"))
    modules = _read_modules(folder)
    names = [name for name, _ in modules]
    if names[:2] != ["Transformer", "Pooling"] or names[2:] not in ([], ["Normalize"]):
        found = ", ".join(names)
        raise CheckpointError(f"modules.json: {found} is not supported; supported is Transformer, Pooling, Normalize")
    if modules[0][1]:
        raise CheckpointError(f"modules.json: the network lies in {modules[0][1]}, supported is the folder itself")
    texts = _optional(folder, "sentence_bert_config.json")
    lengths = (_read_length(texts, "max_seq_length"), _read_length(tokenizer, "model_max_length"))
    prompts, default = _read_prompts(_optional(folder, "config_sentence_transformers.json"))
    return SentenceSettings(
        pooling=_read_pooling(folder, Path(modules[1][1]) / "config.json"),
        normalizes=len(names) == 3,
        max_length=min((length for length in lengths if length), default=None),
        lowercase=texts.flag("do_lower_case"),
        prompts=prompts,
        default_prompt=default,
    )


def _read_length(raw: RawConfig, name: str) -> int | None:
    """A number of tokens; None: there is none, or one that means no limit."""
    length = raw.get(name)
    if isinstance(length, int | float) and length > _LONGEST:
        return None
    return None if length is None else raw.integer(name)


def _read_modules(folder: Path) -> Sequence[tuple[str, str]]:
    """The last part of each module's type, and its folder. Raises CheckpointError."""
    try:
        entries = parse_json(read_bounded(folder / "modules.json"), "modules.json")
        modules = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"modules.json cannot be read: {type(error).__name__}") from None
    for _, path in modules:
        if Path(path).name != path:
            raise CheckpointError("modules.json names a folder outside the checkpoint")
    return modules


def _read_pooling(folder: Path, file: Path) -> Pooling:
    if not (folder / file).exists():
        raise CheckpointError(f"{file} is missing")
    raw = RawConfig(_read_json(folder / file), str(file))
    chosen = raw.get("pooling_mode")
    if chosen is None:
        chosen = [mode for name, mode in _OLD_SETTINGS.items() if raw.flag(name)]
    modes = chosen if isinstance(chosen, list) else [chosen]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        named = ", ".join(map(str, modes)) or "none"
        raise CheckpointError(f"pooling {named[:64]} is not supported; supported is one of {', '.join(_POOLINGS)}")
    if not raw.flag("include_prompt", default=True):
        raise CheckpointError("pooling with include_prompt false is not supported")
    return _POOLINGS[modes[0]]


def _read_prompts(raw: RawConfig) -> tuple[Mapping[str, str], str]:
    prompts, default = raw.section("prompts").values, raw.get("default_prompt_name")
    short = all(isinstance(text, str) and len(text) <= _MOST_PROMPT_CHARACTERS for text in prompts.values())
    if len(prompts) > _MOST_PROMPTS or not short:
        limits = f"{_MOST_PROMPTS} texts of at most {_MOST_PROMPT_CHARACTERS} characters"
        raise CheckpointError(f"config_sentence_transformers.json: prompts are not at most {limits}")
    if default is not None and default not in prompts:
        raise CheckpointError("config_sentence_transformers.json: default_prompt_name names no prompt")
    return prompts, str(default or "")


def _optional(folder: Path, file: str) -> RawConfig:
    """A file that need not be there."""
    path = folder / file
    return RawConfig(_read_json(path) if path.exists() else {}, file)
