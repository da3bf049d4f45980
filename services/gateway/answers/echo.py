"""The prompt as a client receives it before the answer: text, tokens and log-probabilities. Knows no links."""

import math
from collections.abc import Iterator

from protos import inference_pb2 as api
from services.gateway.text.journal import Detail, Journal
from services.gateway.text.tokenizer import TextModel

_MAX_TOKENS = 256
"""Most tokens of one message, as of an answer's."""


def asks(request: api.GenerateRequest) -> bool:
    """Whether the request asks for its prompt in the answer."""
    return request.echo or request.sampling.HasField("prompt_logprobs")


def ready(request: api.GenerateRequest, journal: Journal) -> bool:
    """Whether all is known that is to be sent."""
    return not request.sampling.HasField("prompt_logprobs") or len(journal.prompt_details) >= len(journal.prompt) - 1


def parts(request: api.GenerateRequest, journal: Journal, text: TextModel) -> Iterator[api.PromptEcho]:
    """The prompt in parts."""
    prompt, scored = journal.prompt, request.sampling.HasField("prompt_logprobs")
    for start in range(0, len(prompt), _MAX_TOKENS):
        token_ids = prompt[start : start + _MAX_TOKENS]
        echo = api.PromptEcho(position=start, token_ids=token_ids)
        if start == 0:
            is_text = request.prompt.WhichOneof("form") == "text"
            echo.text = request.prompt.text if is_text else text.decode(prompt)
        for place, token in enumerate(token_ids if scored else (), start):
            echo.logprobs.append(position_of(token, journal.prompt_details[place - 1] if place else _FIRST, text))
        yield echo


_FIRST = Detail(math.nan)


def position_of(token: int, detail: Detail, text: TextModel) -> api.PositionLogprobs:
    """The log-probabilities of one token."""
    place = api.PositionLogprobs()
    place.chosen.token_id, place.chosen.text, place.chosen.logprob = token, text.piece(token), detail.logprob
    for top_id, top_logprob in zip(detail.top_ids, detail.top_logprobs, strict=True):
        place.top.add(token_id=top_id, text=text.piece(top_id), logprob=top_logprob)
    return place
