"""Stop strings: the matcher agrees with a naive search over the whole text for every split into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.stop_strings import StopMatcher

words = st.text("abc", min_size=1, max_size=4)


def naive(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Character by character: the text before the stop string, the stop string, and the tokens up to it."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            found = max((stop for stop in stops if text.endswith(stop)), key=len, default=None)
            if found is not None and count >= min_tokens:
                return text[: -len(found)], found, count
    return text, None, len(pieces)


def run(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """The result of the matcher, in the form of `naive`."""
    matcher = StopMatcher(stops, min_tokens)
    text = ""
    for count, piece in enumerate(pieces, 1):
        text += matcher.feed(piece)
        if matcher.found is not None:
            return text, matcher.found, count
    return text + matcher.flush(), matcher.found, len(pieces)


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(words, min_size=1, max_size=4), st.integers(0, 6))
def test_it_finds_what_a_naive_search_finds(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    assert run(pieces, stops, min_tokens) == naive(pieces, stops, min_tokens)


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(words, min_size=1, max_size=4))
def test_it_holds_back_only_what_may_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    certain, text = "", ""
    for piece in pieces:
        certain += matcher.feed(piece)
        text += piece
        if matcher.found is not None:
            return
        held = text[len(certain) :]
        assert text.startswith(certain)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert run(["xab", "cd"], ["c", "abc"], 0) == ("x", "abc", 2)


def test_the_stop_string_that_ends_first_wins() -> None:
    assert run(["abcd"], ["abcd", "bc"], 0) == ("a", "bc", 1)


def test_text_released_by_the_flush_is_searched() -> None:
    matcher = StopMatcher(["b\ufffd"])
    assert matcher.feed("ab") == "a"
    assert matcher.flush("\ufffd") == ""
    assert matcher.found == "b\ufffd"
