"""BERT and the models of its shape: MiniLM, BGE, E5, GTE. Knows their settings and tensor names."""

from services.worker.models.encoders.config import EncoderConfig
from services.worker.models.encoders.family import (
    EncoderFamily,
    EncoderPart,
    read_activation,
    read_head,
    read_heads,
    refuse,
)
from services.worker.models.raw_config import RawConfig


def _read_config(raw: RawConfig) -> EncoderConfig:
    return read_bert(raw)


def read_bert(raw: RawConfig, first_position: int = 0, eps: float = 1e-12) -> EncoderConfig:
    """The configuration of an encoder with BERT's settings. Raises CheckpointError."""
    refuse(raw, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    return EncoderConfig(
        architecture=raw.architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("hidden_size"),
        intermediate_size=raw.integer("intermediate_size"),
        layers=raw.layers("num_hidden_layers"),
        heads=read_heads(raw, "num_attention_heads", "hidden_size"),
        norm_eps=raw.number("layer_norm_eps", eps),
        activation=read_activation(raw, "hidden_act"),
        positions=raw.integer("max_position_embeddings"),
        first_position=first_position,
        segments=raw.integer("type_vocab_size", 2),
        head=read_head(raw, "tanh"),
    )


_LAYER = "encoder.layer.{layer}."
_SELF = f"{_LAYER}attention.self."
MODULES = {
    EncoderPart.TOKENS: ("embeddings.word_embeddings",),
    EncoderPart.POSITIONS: ("embeddings.position_embeddings",),
    EncoderPart.SEGMENTS: ("embeddings.token_type_embeddings",),
    EncoderPart.EMBEDDING_NORM: ("embeddings.LayerNorm",),
    EncoderPart.QKV: (f"{_SELF}query", f"{_SELF}key", f"{_SELF}value"),
    EncoderPart.OUTPUT: (f"{_LAYER}attention.output.dense",),
    EncoderPart.ATTENTION_NORM: (f"{_LAYER}attention.output.LayerNorm",),
    EncoderPart.UP: (f"{_LAYER}intermediate.dense",),
    EncoderPart.DOWN: (f"{_LAYER}output.dense",),
    EncoderPart.MLP_NORM: (f"{_LAYER}output.LayerNorm",),
}
FAMILY = EncoderFamily(
    architectures=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    read_config=_read_config,
    modules={
        **MODULES,
        EncoderPart.HEAD_DENSE: ("pooler.dense",),
        EncoderPart.HEAD_LABELS: ("classifier",),
    },
    prefix="bert.",
    unread=("cls.", "pooler."),
)
