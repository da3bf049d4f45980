"""The journal: attempts, recovery and delivered text are consistent."""

from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as api
from protos import mesh_pb2
from services.gateway.text.journal import Detail, Ending, Journal, KeyChain
from services.gateway.text.stop_strings import StopMatcher
from services.gateway.text.tokenizer import TextModel
from services.hashing import block_keys
from tests.gateway.model import BUNDLE, TOKENIZER, ids_of

MODEL = TextModel(mesh_pb2.Bundle.FromString(BUNDLE))
ids = st.integers(0, TOKENIZER.get_vocab_size() - 1)


def new(*stops: str, min_tokens: int = 0) -> Journal:
    """A journal of a prompt of three tokens."""
    return Journal([7, 8, 9], MODEL.detokenizer(), StopMatcher(stops, min_tokens) if stops else None)


@given(st.lists(st.lists(ids, max_size=5), min_size=1, max_size=6))
def test_each_token_belongs_to_the_attempt_that_produced_it(attempts: list[list[int]]) -> None:
    journal = new()
    owners: list[int] = []
    for number, tokens in enumerate(attempts, 1):
        journal.begin_attempt()
        assert journal.attempt == number
        assert journal.context() == [7, 8, 9, *journal.tokens]
        journal.extend(tokens)
        owners += [number] * len(tokens)
    position = 0
    while position < len(owners):
        attempt, end = journal.attempt_at(position)
        assert end > position
        assert owners[position:end] == [attempt] * (end - position)
        assert end == len(owners) or owners[end] != attempt
        position = end
    assert journal.attempt_at(position)[1] == len(owners)


@given(st.lists(ids, max_size=40), st.integers(1, 7))
def test_the_text_does_not_depend_on_the_grouping_of_tokens(tokens: list[int], step: int) -> None:
    journal = new()
    journal.begin_attempt()
    for start in range(0, len(tokens), step):
        journal.extend(tokens[start : start + step])
    journal.end(Ending(api.FINISH_REASON_LENGTH))
    assert "".join(journal.texts) == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_tokens_after_a_stop_string_are_dropped() -> None:
    journal = new("lazy")
    tokens = ids_of("over the lazy dog and on")
    journal.extend(tokens)
    assert journal.ending == Ending(api.FINISH_REASON_STOP, stop_string="lazy")
    assert TOKENIZER.decode(journal.tokens) == "over the lazy"
    assert "".join(journal.texts) == "over the "
    journal.extend([3, 3])
    journal.end(Ending(api.FINISH_REASON_LENGTH))
    assert TOKENIZER.decode(journal.tokens) == "over the lazy"
    assert journal.ending.reason == api.FINISH_REASON_STOP


def test_a_stop_string_may_be_complete_only_at_the_end() -> None:
    journal = new("b\ufffd")
    journal.extend(ids_of("ab日")[:-1])
    assert "".join(journal.texts) == "a"
    journal.end(Ending(api.FINISH_REASON_LENGTH))
    assert journal.ending == Ending(api.FINISH_REASON_STOP, stop_string="b\ufffd")
    assert "".join(journal.texts) == "a"


@given(st.lists(ids, max_size=30), st.lists(st.integers(0, 30), max_size=4), st.integers(1, 5))
def test_keys_grow_with_the_sequence(tokens: list[int], cuts: list[int], block_size: int) -> None:
    chain = KeyChain(b"root", block_size)
    for cut in sorted(min(cut, len(tokens)) for cut in [*cuts, len(tokens)]):
        assert chain.extend_to(tokens[:cut]) == b"".join(block_keys(tokens[:cut], block_size, b"root"))


def test_log_probabilities_of_a_prompt_are_kept_once_over_attempts() -> None:
    journal = Journal([1, 2, 3, 4], MODEL.detokenizer(), None)
    one, two, three = (Detail(-float(value)) for value in (1, 2, 3))
    journal.score(1, [one])
    journal.score(1, [one, two])  # The next attempt begins anew.
    journal.score(3, [three])
    assert journal.prompt_details == [one, two, three]
