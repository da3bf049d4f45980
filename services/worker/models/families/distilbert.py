"""DistilBERT. Knows its settings and tensor names."""

from services.worker.models.encoders.config import EncoderConfig
from services.worker.models.encoders.family import (
    EncoderFamily,
    EncoderPart,
    read_activation,
    read_head,
    read_heads,
)
from services.worker.models.raw_config import RawConfig

_NORM_EPS = 1e-12  # Fixed in the architecture.


def _read_config(raw: RawConfig) -> EncoderConfig:
    return EncoderConfig(
        architecture=raw.architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("dim"),
        intermediate_size=raw.integer("hidden_dim"),
        layers=raw.layers("n_layers"),
        heads=read_heads(raw, "n_heads", "dim"),
        norm_eps=_NORM_EPS,
        activation=read_activation(raw, "activation"),
        positions=raw.integer("max_position_embeddings"),
        head=read_head(raw, "relu"),
    )


_LAYER = "transformer.layer.{layer}."
_ATTENTION = f"{_LAYER}attention."
FAMILY = EncoderFamily(
    architectures=("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification"),
    read_config=_read_config,
    modules={
        EncoderPart.TOKENS: ("embeddings.word_embeddings",),
        EncoderPart.POSITIONS: ("embeddings.position_embeddings",),
        EncoderPart.EMBEDDING_NORM: ("embeddings.LayerNorm",),
        EncoderPart.QKV: (f"{_ATTENTION}q_lin", f"{_ATTENTION}k_lin", f"{_ATTENTION}v_lin"),
        EncoderPart.OUTPUT: (f"{_ATTENTION}out_lin",),
        EncoderPart.ATTENTION_NORM: (f"{_LAYER}sa_layer_norm",),
        EncoderPart.UP: (f"{_LAYER}ffn.lin1",),
        EncoderPart.DOWN: (f"{_LAYER}ffn.lin2",),
        EncoderPart.MLP_NORM: (f"{_LAYER}output_layer_norm",),
        EncoderPart.HEAD_DENSE: ("pre_classifier",),
        EncoderPart.HEAD_LABELS: ("classifier",),
    },
    prefix="distilbert.",
    unread=("vocab_",),
)
