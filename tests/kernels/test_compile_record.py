"""The record of compiled kernels: it saves a compilation only where nothing changed, and its errors are found."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels import compile_record
from tests.kernels.compile_record import Compiled, CompileRecord

H100 = GPUTarget("cuda", 90, 32)


@triton.jit  # type: ignore[untyped-decorator]
def doubled_kernel(values, COUNT: triton.language.constexpr):  # type: ignore[no-untyped-def]
    places = triton.language.arange(0, COUNT)
    triton.language.store(values + places, triton.language.load(values + places) * 2)


def source(count: int) -> ASTSource:
    return ASTSource(doubled_kernel, {"values": "*fp32", "COUNT": "constexpr"}, {(1,): count})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for records; what is in it is believed."""
    monkeypatch.setattr(compile_record, "FOLDER", tmp_path)
    monkeypatch.setattr(compile_record, "SAMPLE", 0.0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def written() -> CompileRecord:
    record = CompileRecord("sm_90-float32", fresh=True)
    record.compile(source(64), H100, {})
    record.write()
    return record


def test_a_kernel_that_did_not_change_is_remembered() -> None:
    first, second = written(), CompileRecord("sm_90-float32")
    assert second.compile(source(64), H100, {}) == Compiled(0, 0, 0)
    assert second.known == first.used
    assert (first.compiled, second.compiled) == (1, 0)


@pytest.mark.parametrize(
    ("count", "target", "options"),
    [(128, H100, {}), (64, GPUTarget("cuda", 80, 32), {}), (64, H100, {"num_warps": 8})],
    ids=["argument", "target", "option"],
)
def test_another_argument_target_or_option_compiles(count: int, target: GPUTarget, options: dict[str, int]) -> None:
    written()
    record = CompileRecord("sm_90-float32")
    record.compile(source(count), target, options)
    assert record.compiled == 1


def test_a_wrong_record_is_found_by_the_sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written()
    file = folder / "sm_90-float32.txt"
    file.write_text(file.read_text().replace(" 0 0 0\n", " 16 0 0\n"))
    monkeypatch.setattr(compile_record, "SAMPLE", 1.0)
    with pytest.raises(AssertionError, match="is remembered"):
        CompileRecord("sm_90-float32").compile(source(64), H100, {})
