"""The TensorRT engine over a stand-in for its library: what is built, what is called, and what is refused.

No device has run it: the stand-in records the calls and computes the network that was exported.
"""

import ctypes
import functools
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.build import runtimes
from services.worker.build.export import load_network
from services.worker.errors import CheckpointError
from services.worker.loader.config import load_config
from services.worker.runners.runtime.session import Signature
from services.worker.runners.tensorrt import Limits, TensorrtSession
from tests.checkpoints import VOCAB
from tests.worker.drive import job, open_engine, prompt_of, run

SIGNATURE = Signature(1, picks_logits=True)
OPTIONS: dict[str, Any] = {"kv_blocks": 64, "max_batch_size": 4, "step_tokens": 48}


class Library(types.ModuleType):
    """As much of `tensorrt` as the session uses, over a network of one layer."""

    def __init__(self, network: Any, folder: Path) -> None:
        super().__init__("tensorrt")
        self.network, self.config = network, load_config(folder)
        self.profile: dict[str, tuple[Any, ...]] = {}
        self.builds, self.calls = 0, 0
        self.readable = True
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        past = (-1, self.config.kv_heads, -1, self.config.head_dim)
        self.declared: dict[str, tuple[int, ...]] = {
            name: past if "past" in name else (-1, -1) for name in SIGNATURE.inputs
        }
        self.declared["logits_at"] = (-1,)
        self.num_inputs = len(SIGNATURE.inputs)
        self.num_io_tensors = self.num_inputs + len(SIGNATURE.outputs)
        self.TensorIOMode = types.SimpleNamespace(INPUT="input", OUTPUT="output")
        self.Logger = type("Logger", (), {"WARNING": 1, "__init__": lambda *_: None})
        # One object plays all parts: the session keeps them apart by their methods.
        self.Builder = self.OnnxParser = self.Runtime = lambda *_: self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            return lambda *_: self
        raise AttributeError(name)

    def parse_from_file(self, path: str) -> bool:
        return self.readable

    def get_error(self, index: int) -> str:
        return "an operator that is not supported"

    def get_input(self, index: int) -> Any:
        return types.SimpleNamespace(name=SIGNATURE.inputs[index])

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        self.profile[name] = shapes

    def add_optimization_profile(self, profile: Any) -> None:
        assert profile is self

    def build_serialized_network(self, network: Any, settings: Any) -> bytes:
        self.builds += 1
        return b"plan"

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        return self if plan == b"plan" else None

    def get_tensor_name(self, index: int) -> str:
        return [*SIGNATURE.inputs, *SIGNATURE.outputs][index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in SIGNATURE.inputs else "output"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.declared:
            return self.declared[name]
        rows, tokens = self.shapes["input_ids"]
        new = (rows, self.config.kv_heads, tokens, self.config.head_dim)
        return (*self.shapes["logits_at"], self.config.vocab_size) if name == "logits" else new

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        least, _, most = self.profile[name]
        assert all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)), (name, shape)
        self.shapes[name] = shape

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        """Read the inputs from where they are, compute, and write the outputs to where they belong."""
        self.calls += 1
        given = [self._read(name) for name in SIGNATURE.inputs]
        for name, found in zip(SIGNATURE.outputs, self.network(*given[:4], given[4:]), strict=True):
            made = found.contiguous()
            ctypes.memmove(self.addresses[name], made.data_ptr(), made.nbytes)
        return True

    def _read(self, name: str) -> torch.Tensor:
        shape, dtype = self.shapes[name], torch.float32 if "past" in name else torch.int64
        count = math.prod(shape)
        if not count:
            return torch.zeros(shape, dtype=dtype)
        size = count * dtype.itemsize
        return torch.frombuffer(bytearray(ctypes.string_at(self.addresses[name], size)), dtype=dtype).view(shape)


@pytest.fixture
def folder(plain_gpt2: Path, tmp_path: Path) -> Path:
    """A checkpoint with a graph that nobody reads."""
    for path in plain_gpt2.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.onnx").write_bytes(b"graph")
    return tmp_path


@pytest.fixture
def library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stand-in, on the CPU."""
    made = Library(load_network(folder, lambda *_: None)[0], folder)
    monkeypatch.setitem(sys.modules, "tensorrt", made)
    monkeypatch.setattr(runtimes, "TensorrtSession", functools.partial(TensorrtSession, device="cpu"))
    return made


def test_it_answers_as_the_torch_engine_and_keeps_its_plan(folder: Path, library: Library, plain_gpt2: Path) -> None:
    jobs = [job(key, prompt_of(length, vocab=VOCAB), max_tokens=20) for key, length in enumerate((1, 17, 100))]
    expected = run(open_engine(plain_gpt2, engine="torch", **OPTIONS), *jobs)
    for _ in range(2):
        found = run(open_engine(folder, engine="tensorrt", **OPTIONS), *jobs)
        assert [found[key].tokens for key in found] == [expected[key].tokens for key in found]
    assert library.calls > 40
    assert library.builds == 1, "the second start reads the plan of the first"
    open_engine(folder, engine="tensorrt", **{**OPTIONS, "max_batch_size": 2})
    assert library.builds == 2, "a plan is for its limits"


def test_the_profile_covers_steps_of_answers_and_chunks_of_prompts(folder: Path, library: Library) -> None:
    session = TensorrtSession(
        str(folder / "model.onnx"), library.config, 512, Limits(rows=4, tokens=48, past=500), None, device="cpu"
    )
    assert session.plan == b"plan"
    assert library.profile["input_ids"] == ((1, 1), (4, 1), (4, 48))
    assert library.profile["attention_mask"] == ((1, 1), (4, 513), (4, 560))
    assert library.profile["past_key_values.0.key"] == ((1, 4, 0, 16), (4, 4, 512, 16), (4, 4, 512, 16))
    assert library.profile["logits_at"] == ((1,), (4,), (48,))


def test_what_it_cannot_read_and_its_absence_are_told_in_one_line(
    folder: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.readable = False
    with pytest.raises(CheckpointError, match=r"^model.onnx cannot be read by tensorrt: an operator that is not supp"):
        open_engine(folder, engine="tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(CheckpointError, match=r"^tensorrt is not installed: pip install 'weft\[tensorrt\]'"):
        open_engine(folder, engine="tensorrt")
