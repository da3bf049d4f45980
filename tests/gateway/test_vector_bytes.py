"""Vectors as messages and as bytes: both have the same numbers, bit for bit."""

import math
from array import array

import numpy as np
import pytest

from protos import inference_pb2 as api
from services.gateway.answers.encoding.vector_bytes import bytes_of, embedding_of


@pytest.mark.parametrize("width", [1, 2, 31, 32, 384, 1024, 4096])
def test_a_vector_and_its_message_have_the_same_numbers(width: int) -> None:
    numbers = np.random.default_rng(width).standard_normal(width).astype(np.float32)
    message = embedding_of(numbers.tobytes())
    assert message == api.Embedding(values=array("f", numbers))
    assert list(message.values) == numbers.tolist()
    assert bytes_of(message) == numbers.tobytes()


def test_numbers_that_are_no_numbers_keep_their_bits() -> None:
    numbers = array("f", [math.nan, -0.0, math.inf, -math.inf, 1e-45])
    message = embedding_of(numbers.tobytes())
    assert bytes_of(message) == numbers.tobytes()
    assert math.isnan(message.values[0])
