"""ALBERT, whose layers share their weights. Knows its settings and tensor names."""

from dataclasses import replace

from services.worker.errors import CheckpointError
from services.worker.models.encoders.config import EncoderConfig
from services.worker.models.encoders.family import EncoderFamily, EncoderPart, read_activation, refuse
from services.worker.models.families import bert
from services.worker.models.raw_config import RawConfig


def _read_config(raw: RawConfig) -> EncoderConfig:
    refuse(raw, inner_group_num=1)
    config = bert.read_bert(raw)
    groups = raw.integer("num_hidden_groups", 1)
    if groups > config.layers:
        raise CheckpointError(f"config.json: num_hidden_groups {groups} exceeds the {config.layers} layers")
    return replace(
        config,
        activation=read_activation(raw, "hidden_act", "gelu_new"),
        embedding_size=raw.integer("embedding_size", 128),
        groups=groups,
    )


_LAYER = "encoder.albert_layer_groups.{layer}.albert_layers.0."
_ATTENTION = f"{_LAYER}attention."
FAMILY = EncoderFamily(
    architectures=("AlbertModel", "AlbertForMaskedLM", "AlbertForSequenceClassification"),
    read_config=_read_config,
    modules={
        EncoderPart.TOKENS: ("embeddings.word_embeddings",),
        EncoderPart.POSITIONS: ("embeddings.position_embeddings",),
        EncoderPart.SEGMENTS: ("embeddings.token_type_embeddings",),
        EncoderPart.EMBEDDING_NORM: ("embeddings.LayerNorm",),
        EncoderPart.EMBEDDING_PROJECTION: ("encoder.embedding_hidden_mapping_in",),
        EncoderPart.QKV: (f"{_ATTENTION}query", f"{_ATTENTION}key", f"{_ATTENTION}value"),
        EncoderPart.OUTPUT: (f"{_ATTENTION}dense",),
        EncoderPart.ATTENTION_NORM: (f"{_ATTENTION}LayerNorm",),
        EncoderPart.UP: (f"{_LAYER}ffn",),
        EncoderPart.DOWN: (f"{_LAYER}ffn_output",),
        EncoderPart.MLP_NORM: (f"{_LAYER}full_layer_layer_norm",),
        EncoderPart.HEAD_DENSE: ("pooler",),
        EncoderPart.HEAD_LABELS: ("classifier",),
    },
    prefix="albert.",
    unread=("predictions.", "sop_classifier.", "pooler."),
)
