"""RoBERTa and XLM-RoBERTa, with them multilingual E5 and BGE-M3. Knows their settings and tensor names."""

from services.worker.errors import CheckpointError
from services.worker.models.encoders.config import EncoderConfig
from services.worker.models.encoders.family import EncoderFamily, EncoderPart
from services.worker.models.families import bert
from services.worker.models.raw_config import RawConfig


def _read_config(raw: RawConfig) -> EncoderConfig:
    padding = raw.get("pad_token_id", 1)
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise CheckpointError("config.json: pad_token_id must be a token: positions begin behind its number")
    return bert.read_bert(raw, padding + 1, 1e-5)


FAMILY = EncoderFamily(
    architectures=(
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
    ),
    read_config=_read_config,
    modules={
        **bert.MODULES,
        EncoderPart.HEAD_DENSE: ("classifier.dense",),
        EncoderPart.HEAD_LABELS: ("classifier.out_proj",),
    },
    prefix="roberta.",
    unread=("lm_head.", "pooler."),
)
