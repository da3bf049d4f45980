"""The stream resumer: the deltas of several attempts become one stream without gaps or repetitions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as api
from weft.client.errors import WeftError
from weft.client.stream_resumer import StreamResumer

TOKENS = 12


ARGUMENTS = ['{"a": 1, "b": [2, 3]}', "{}", '{"city": "Oslo"}']


def text_of(token: int) -> str:
    return f"<{token}>" if token % 3 else ""


@st.composite
def an_attempt(draw: st.DrawFn) -> list[api.Delta]:
    """The whole stream, split into messages at random; text may be sent later than its tokens."""
    cuts = sorted(draw(st.sets(st.integers(1, TOKENS - 1))))
    calls = split_calls(draw)
    text, deltas, said = "".join(text_of(token) for token in range(TOKENS)), [], 0
    for start, end in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        due = len("".join(text_of(token) for token in range(end)))
        until = due if end == TOKENS else draw(st.integers(said, due))
        reason = api.FINISH_REASON_LENGTH if end == TOKENS else api.FINISH_REASON_UNSPECIFIED
        places = [api.PositionLogprobs(chosen=api.TokenLogprob(token_id=token)) for token in range(start, end)]
        deltas.append(
            api.Delta(
                text=text[said:until],
                token_ids=range(start, end),
                position=start,
                logprobs=places,
                finish_reason=reason,
                tool_calls=calls[start:end],
            )
        )
        said = until
    return deltas


def split_calls(draw: st.DrawFn) -> list[api.ToolCallDelta]:
    """TOKENS parts of tool calls, whose arguments are split at random."""
    parts = []
    for index, arguments in enumerate(ARGUMENTS):
        count = TOKENS // len(ARGUMENTS)
        cuts = sorted(draw(st.lists(st.integers(0, len(arguments)), min_size=count - 1, max_size=count - 1)))
        for place, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(arguments)])):
            first = {"id": f"c{index}", "name": f"f{index}"} if place == 0 else {}
            parts.append(api.ToolCallDelta(index=index, arguments=arguments[start:end], **first))
    return parts


@given(st.lists(st.tuples(an_attempt(), st.integers(0, TOKENS)), max_size=4), an_attempt())
def test_tokens_and_characters_arrive_once(broken: list[tuple[list[api.Delta], int]], whole: list[api.Delta]) -> None:
    resumer, received = StreamResumer(), []
    for deltas in [*(deltas[:length] for deltas, length in broken), whole]:
        resumer.begin_attempt()
        received += [new for delta in deltas if (new := resumer.unseen(delta)) is not None]

    assert [token for delta in received for token in delta.token_ids] == list(range(TOKENS))
    assert "".join(delta.text for delta in received) == "".join(text_of(token) for token in range(TOKENS))
    assert [place.chosen.token_id for delta in received for place in delta.logprobs] == list(range(TOKENS))
    assert [delta.finish_reason for delta in received if delta.finish_reason] == [api.FINISH_REASON_LENGTH]
    calls = [["", "", ""] for _ in ARGUMENTS]
    for part in (part for delta in received for part in delta.tool_calls):
        calls[part.index] = [
            a + b for a, b in zip(calls[part.index], (part.id, part.name, part.arguments), strict=True)
        ]
    assert calls == [[f"c{index}", f"f{index}", arguments] for index, arguments in enumerate(ARGUMENTS)]
    position = 0
    for delta in received:
        assert delta.position == position or not delta.token_ids
        position += len(delta.token_ids)


def test_a_different_answer_is_never_joined_to_the_first_one() -> None:
    resumer = StreamResumer()
    resumer.begin_attempt()
    resumer.unseen(api.Delta(token_ids=[1, 2, 3]))
    resumer.begin_attempt()
    with pytest.raises(WeftError, match="REPLAY_DIFFERS"):
        resumer.unseen(api.Delta(token_ids=[1, 2, 4, 5]))


def test_a_gap_in_positions_raises() -> None:
    resumer = StreamResumer()
    resumer.begin_attempt()
    with pytest.raises(WeftError, match="REPLAY_DIFFERS"):
        resumer.unseen(api.Delta(token_ids=[7], position=3))
