"""Frames: an intact frame returns its payload, and any other bytes are rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.security.frames import HEADER_BYTES, FrameError, Kind, seal, unseal

KEY = bytes(range(32))
keys = st.binary(min_size=32, max_size=32)
payloads = st.binary(max_size=300)


@given(keys, payloads)
def test_a_sealed_payload_is_unsealed(key: bytes, payload: bytes) -> None:
    assert unseal(Kind.RESULT, key, seal(Kind.RESULT, key, payload)) == payload


@given(payloads, st.data())
def test_any_flipped_bit_is_detected(payload: bytes, data: st.DataObject) -> None:
    frame = bytearray(seal(Kind.RESULT, KEY, payload))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        unseal(Kind.RESULT, KEY, bytes(frame))


@given(payloads, st.data())
def test_any_truncation_is_detected(payload: bytes, data: st.DataObject) -> None:
    frame = seal(Kind.RESULT, KEY, payload)
    with pytest.raises(FrameError):
        unseal(Kind.RESULT, KEY, frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(payloads, st.binary(min_size=1, max_size=40))
def test_anything_appended_is_detected(payload: bytes, more: bytes) -> None:
    with pytest.raises(FrameError):
        unseal(Kind.RESULT, KEY, seal(Kind.RESULT, KEY, payload) + more)


@given(keys, keys, payloads)
def test_a_frame_of_another_key_is_detected(key: bytes, other: bytes, payload: bytes) -> None:
    if key != other:
        with pytest.raises(FrameError):
            unseal(Kind.RESULT, other, seal(Kind.RESULT, key, payload))


def test_a_frame_that_was_made_without_the_secret_is_detected() -> None:
    assert unseal(Kind.RESULT, KEY, seal(Kind.RESULT, KEY, b"payload", b"secret"), b"secret") == b"payload"
    for other in (b"", b"another secret"):
        with pytest.raises(FrameError):
            unseal(Kind.RESULT, KEY, seal(Kind.RESULT, KEY, b"payload", other), b"secret")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_frame(noise: bytes) -> None:
    with pytest.raises(FrameError):
        unseal(Kind.RESULT, KEY, noise)


def test_every_single_bit_of_one_frame() -> None:
    frame = seal(Kind.RESULT, KEY, b"the weft is what is woven through")
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            unseal(Kind.RESULT, KEY, bytes(damaged))


def test_the_header_has_26_bytes() -> None:
    assert len(seal(Kind.RESULT, KEY, b"")) == HEADER_BYTES == 26
