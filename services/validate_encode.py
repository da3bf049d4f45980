"""Checks requests to encoders and the tasks that are made of them. Gateway and worker run the same checks."""

from collections.abc import Sequence

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import invalid
from services.validate import MAX_PRIORITY, check_known, check_policy, check_request_id, check_token_ids

TASK_UNSUPPORTED = "TASK_UNSUPPORTED"
MAX_INPUTS = 2048
MAX_TASK_TEXTS = 64
"""Texts of one job: a larger request has several jobs, which workers share."""
MAX_VECTOR_BYTES = 3 << 20
"""Bytes of all vectors of a reply: clients receive messages of at most 4 MiB unless they are configured otherwise."""
EncodeRequest = api.EmbedRequest | api.RankRequest | api.ClassifyRequest


def check_encode_request(request: EncodeRequest) -> None:
    """Checks what can be checked without the model's card. Raises WeftError."""
    check_known(request, "request")
    options = request.options
    if abs(options.priority) > MAX_PRIORITY:
        raise invalid("options.priority", f"between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    check_policy("options.cache", options.cache)
    check_request_id("options.request_id", options.request_id)
    if isinstance(request, api.RankRequest):
        if not request.query:
            raise invalid("query", "empty", "EMPTY_INPUT")
        _check_count("documents", len(request.documents))
        return
    _check_count("inputs", len(request.inputs))
    for place, each in enumerate(request.inputs):
        form = each.WhichOneof("form")
        if form is None:
            raise invalid(f"inputs[{place}]", "one of text or token_ids is required", "EMPTY_INPUT")
        if form == "text" and not each.text:
            raise invalid(f"inputs[{place}].text", "empty", "EMPTY_INPUT")
        if form == "token_ids" and not each.token_ids.ids:
            raise invalid(f"inputs[{place}].token_ids", "empty", "EMPTY_INPUT")


def _check_count(field: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise invalid(field, f"1 to {MAX_INPUTS}")


def check_task(card: mesh.ModelCard, task: str) -> None:
    """Checks that a model does what is asked: generate, embed, rank or classify. Raises WeftError."""
    does = tasks_of(card)
    if task not in does:
        raise invalid("model", f"{card.name} does not {task}: it does {', '.join(does)}", TASK_UNSUPPORTED)


def tasks_of(card: mesh.ModelCard) -> Sequence[str]:
    """What a model does."""
    return list(card.encoder.tasks) if card.HasField("encoder") else ["generate"]


def check_embed(request: api.EmbedRequest, card: mesh.ModelCard) -> None:
    """Checks the fields of Embed against the model's card. Raises WeftError."""
    encoder = card.encoder
    if request.HasField("prompt_name"):
        if request.prompt_name not in encoder.prompts:
            there = ", ".join(sorted(encoder.prompts)) or "none"
            raise invalid("prompt_name", f"the model has no such prompt: there are {there}", "PROMPT_UNKNOWN")
        if any(each.WhichOneof("form") == "token_ids" for each in request.inputs):
            raise invalid("prompt_name", "not for token ids", "PROMPT_UNSUPPORTED")
    if request.HasField("dimensions"):
        _check_dimensions(request.dimensions, encoder)
    width = request.dimensions or encoder.width
    if len(request.inputs) * width * 4 > MAX_VECTOR_BYTES:
        most = MAX_VECTOR_BYTES // (4 * width)
        raise invalid("inputs", f"at most {most} for vectors of {width} numbers", "TOO_MANY_INPUTS")


def _check_dimensions(dimensions: int, encoder: mesh.EncoderCard) -> None:
    if dimensions == encoder.width or dimensions in encoder.dimensions:
        return
    if not 1 <= dimensions <= encoder.width:
        raise invalid("dimensions", f"from 1 to {encoder.width}")
    if not encoder.any_dimensions:
        sizes = ", ".join(map(str, sorted({*encoder.dimensions, encoder.width})))
        raise invalid("dimensions", f"the model's vectors have {sizes}", "DIMENSIONS_UNSUPPORTED")


def check_input(field: str, token_ids: Sequence[int], card: mesh.ModelCard) -> None:
    """Checks that a tokenized input is not empty, in the vocabulary and not too long. Raises WeftError."""
    if not token_ids:
        raise invalid(field, "no tokens", "EMPTY_INPUT")
    check_token_ids(field, token_ids, card)
    if len(token_ids) > card.context_length:
        rule = f"{len(token_ids)} tokens exceed the context of {card.context_length}: truncate cuts them"
        raise invalid(field, rule, "CONTEXT_EXCEEDED")


def check_encode_task(job: mesh.Job, card: mesh.ModelCard) -> None:
    """Checks a job for an encoder, as a worker receives it, but for its token ids. Raises WeftError."""
    task, encoder = job.encode, card.encoder
    if not card.HasField("encoder"):
        raise invalid("encode", "this worker's model generates", TASK_UNSUPPORTED)
    if not 1 <= len(task.lengths) <= MAX_TASK_TEXTS:
        raise invalid("encode.lengths", f"1 to {MAX_TASK_TEXTS} texts")
    if not 1 <= min(task.lengths) <= max(task.lengths) <= card.context_length:
        raise invalid("encode.lengths", f"each 1 to {card.context_length}")
    if sum(task.lengths) != len(job.token_ids) or job.prompt_len != len(job.token_ids):
        raise invalid("encode.lengths", "their sum must be the number of token ids")
    if task.seconds and len(task.seconds) != len(task.lengths):
        raise invalid("encode.seconds", "one for each text or none")
    if any(not 0 < second < length for second, length in zip(task.seconds, task.lengths, strict=False)):
        raise invalid("encode.seconds", "each within its text")
    if task.dimensions:
        _check_dimensions(task.dimensions, encoder)
