"""Contents of blocks that are rounded to fp8 and expanded again: near the original ones, and never a crash."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.block_messages import seal_block, unseal_block
from services.security.frames import FrameError
from services.worker.kvcache.fp8_rounding import GROUP, Fp8Rounding, rounding_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = (1, 63, 64, 65, 1000, 16 * 2 * 3 * 20, 24_576)
SECRET = b"s" * 32


def bytes_of(numbers: Tensor) -> bytes:
    return numbers.view(torch.uint8).numpy().tobytes()


def rounding(dtype: str, numbers: int) -> Fp8Rounding:
    made = rounding_of(dtype, numbers * DTYPES[dtype].itemsize)
    assert made is not None
    return made


def there_and_back(numbers: Tensor) -> Tensor:
    own = Fp8Rounding(numbers.dtype, numbers.numel())
    expanded = own.expand(own.round(bytes_of(numbers)))
    return torch.frombuffer(bytearray(expanded), dtype=numbers.dtype)


def reference(numbers: Tensor) -> Tensor:
    """What comes of numbers, group by group: the smallest power of two by which all are at most 448 is the scale."""
    parts = []
    for group in torch.split(numbers.double(), GROUP):
        largest = float(group.abs().max())
        scale = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
        parts.append((group / scale).float().to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(parts).to(numbers.dtype)


def spread(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers of many sizes, some of them zero."""
    source = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=source) * torch.exp2(torch.randint(-8, 9, (count,), generator=source))
    return torch.where(torch.rand(count, generator=source) < 0.1, 0.0, numbers).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", SIZES)
def test_numbers_are_rounded_as_plain_torch_rounds_them(dtype: str, count: int) -> None:
    numbers = spread(count, DTYPES[dtype])
    assert torch.equal(there_and_back(numbers), reference(numbers))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_changes_by_more_than_a_sixteenth(dtype: str) -> None:
    numbers = spread(10_000, DTYPES[dtype], seed=1)
    largest = torch.stack([group.abs().max() for group in torch.split(numbers.double(), GROUP)]).repeat_interleave(
        GROUP
    )
    change = (there_and_back(numbers).double() - numbers.double()).abs()
    assert bool((change <= torch.maximum(numbers.double().abs() / 16, largest[:10_000] * 2**-17)).all())
    assert float(change.max()) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_was_rounded_is_not_changed_again(dtype: str) -> None:
    once = there_and_back(spread(5_000, DTYPES[dtype], seed=2))
    assert torch.equal(there_and_back(once), once)


@pytest.mark.parametrize(("dtype", "share"), [("float32", 3.93), ("bfloat16", 1.96), ("float16", 1.96)])
def test_rounded_blocks_are_small(dtype: str, share: float) -> None:
    own, numbers = rounding(dtype, 24_576), spread(24_576, DTYPES[dtype])
    contents = bytes_of(numbers)
    assert len(own.round(contents)) == own.rounded_bytes < len(contents) / share


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_and_the_largest_numbers_stay_finite(dtype: str) -> None:
    zeros = torch.zeros(100, dtype=DTYPES[dtype])
    assert torch.equal(there_and_back(zeros), zeros)
    largest = 60_000.0 if dtype == "float16" else 3e38
    numbers = torch.tensor([largest, -largest, 1.0], dtype=DTYPES[dtype])
    assert bool(torch.isfinite(there_and_back(numbers)).all())
    half = torch.tensor([65504.0, -65504.0, 3.0], dtype=torch.float16)
    assert there_and_back(half)[:2].tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_are_damage(dtype: str, wrong: float) -> None:
    own, numbers = rounding(dtype, 200), spread(200, DTYPES[dtype])
    numbers[130] = wrong
    with pytest.raises(FrameError):
        own.expand(own.round(bytes_of(numbers)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_no_pool_has_is_damage(dtype: str) -> None:
    own = rounding(dtype, 200)
    rounded = bytearray(own.round(bytes_of(spread(200, DTYPES[dtype]))))
    rounded[2] = 127
    with pytest.raises(FrameError):
        own.expand(bytes(rounded))


@given(st.binary(max_size=120), st.sampled_from(sorted(DTYPES)))
@settings(deadline=None)
def test_any_bytes_are_numbers_or_damage(received: bytes, dtype: str) -> None:
    """The last two exponents and 64 + 10 numbers are expected."""
    own = rounding(dtype, 74)
    try:
        expanded = torch.frombuffer(bytearray(own.expand(received.ljust(76, b"\x11"))), dtype=DTYPES[dtype])
    except FrameError:
        return
    assert len(received) <= 76
    assert bool(torch.isfinite(expanded).all())


def test_a_block_of_another_size_is_damage() -> None:
    own = rounding("float32", 200)
    rounded = own.round(bytes_of(spread(200, torch.float32)))
    for wrong in (b"", rounded[:66], rounded + b"\0"):  # 66 bytes: two exponents, and 64 numbers.
        with pytest.raises(FrameError):
            own.expand(wrong)


def test_blocks_of_8_bits_are_not_rounded() -> None:
    assert [rounding_of(dtype, 1024) for dtype in ("float8_e4m3fn", "int8", "")] == [None] * 3


def test_a_rounded_frame_is_never_taken_for_another() -> None:
    """Neither by who expects another format or part, nor by who has another secret, key or layout."""
    key, layout, own = b"k" * 32, b"a layout", rounding("float32", 64)
    contents = bytes_of(spread(64, torch.float32))
    rounded = seal_block(key, layout, contents, SECRET, own)
    plain = seal_block(key, layout, contents, SECRET, None)
    assert unseal_block(key, layout, rounded, SECRET, own) == own.expand(own.round(contents))
    assert unseal_block(key, layout, plain, SECRET, None) == contents
    wrong = [
        (key, layout, rounded, SECRET, None),
        (key, layout, plain, SECRET, own),
        (key, layout, rounded, b"another", own),
        (b"j" * 32, layout, rounded, SECRET, own),
        (key, b"b layout", rounded, SECRET, own),
    ]
    for one in wrong:
        with pytest.raises(FrameError):
            unseal_block(*one)
    part = seal_block(key, layout, contents, SECRET, None, 64)
    assert unseal_block(key, layout, part, SECRET, None, 64) == contents
    for frame, offset in ((part, 0), (part, 128), (plain, 64)):
        with pytest.raises(FrameError):
            unseal_block(key, layout, frame, SECRET, None, offset)
