"""Decoders that another runtime computes answer as the torch engine does, and refuse by name what they cannot do."""

import dataclasses
import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from kernels import quantized_weights
from kernels.quantized_weights import Int8Weight, QuantizedWeight, StackedWeight
from services.worker.build.choose import build_engine
from services.worker.build.export import export, load_network
from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from services.worker.job import EndReason, Job
from services.worker.loader.config import load_config
from services.worker.options import EngineOptions, MemoryPlan
from services.worker.runners.openvino_products import Products
from services.worker.runners.runtime.calls import divide
from services.worker.runners.runtime.network import NetworkSession
from services.worker.runners.runtime.past import PastGroup, PastShape
from services.worker.runners.runtime.products import RoundedOps
from services.worker.runners.runtime.runner import RuntimeRunner
from services.worker.runners.runtime.session import Call, Computed, DecoderSession, Signature, read_signature
from tests.checkpoints import SHAPES, VOCAB
from tests.exports import copy_of
from tests.worker.drive import Answer, job, open_engine, prompt_of, run, solo

pytestmark = pytest.mark.xdist_group("exports")

TOLERANCE = 2e-4
SMALL: Mapping[str, Any] = {"kv_blocks": 128, "max_batch_size": 8, "step_tokens": 48}
PROMPTS = [prompt_of(length, vocab=VOCAB) for length in (1, 17, 64, 150, 3)]


def jobs(**settings: Any) -> list[Job]:
    """A job for each prompt; the first 48 tokens of a step are computed, so that long prompts come in chunks."""
    return [job(key, ids, max_tokens=40, logprobs=2, **settings) for key, ids in enumerate(PROMPTS)]


def assert_alike(mine: Mapping[int, Answer], its: Mapping[int, Answer]) -> None:
    """Equal tokens, and log-probabilities within the tolerance."""
    for key, answer in its.items():
        assert mine[key].tokens == answer.tokens, key
        np.testing.assert_allclose(_numbers(mine[key].logprobs), _numbers(answer.logprobs), atol=TOLERANCE, rtol=0)


def _numbers(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def engine_over(session: DecoderSession, folder: Path, padding_tokens: int = 256) -> GenerationEngine:
    """An engine on a runner that computes by this session."""
    options, config = EngineOptions(**SMALL), load_config(folder)
    plan = MemoryPlan(0, 0, 0, 0, 128, 128 * 16, config.context_length)
    runner = RuntimeRunner(
        session,
        PastShape(config.layers, config.kv_heads, config.head_dim, torch.float32),
        config,
        plan.kv_blocks,
        options.block_size,
        options.max_batch_size,
        plan.max_seq_length,
        padding_tokens,
    )
    return GenerationEngine(options, plan, runner, config.eos_token_ids)


def network_of(folder: Path, **options: Any) -> NetworkSession:
    """The network in torch: plain float32, also where options round its weights."""
    return NetworkSession(load_network(folder, lambda *_: None, EngineOptions(engine="torch", **options))[0])


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_network_that_is_exported_computes_every_family(checkpoint: Callable[[str], Path], shape: str) -> None:
    folder = checkpoint(shape)
    if load_config(folder).moe is not None:
        with pytest.raises(CheckpointError, match=r"mixtures of experts \(\w+\) cannot be exported"):
            network_of(folder)
        return
    expected = run(open_engine(folder, engine="torch", **SMALL), *jobs())
    assert_alike(run(engine_over(network_of(folder), folder), *jobs()), expected)


class LikeOptimum:
    """Computes as a graph of Optimum does: logits of all tokens, and new keys and values behind those of the past."""

    def __init__(self, session: DecoderSession) -> None:
        self._session = session

    def compute(self, call: Call) -> Computed:
        everywhere = torch.arange(call.input_ids.numel())
        computed = self._session.compute(dataclasses.replace(call, logits_at=everywhere))
        logits = computed.logits.view(*call.input_ids.shape, -1)
        present = [torch.cat((old, new), 2) for old, new in zip(call.past, computed.new, strict=True)]
        return Signature(len(present) // 2, picks_logits=False).computed(call, [logits, *present])


class Reusing:
    """Writes what it computes to the memory of its last call, as a runtime does whose outputs stay bound."""

    def __init__(self, session: DecoderSession) -> None:
        self._session = session
        self._memory = Computed(torch.empty(0), torch.empty(0))

    def compute(self, call: Call) -> Computed:
        computed = self._session.compute(call)
        kept, stacked = self._memory, computed.stacked()
        if (kept.logits.shape, kept.stacked().shape) != (computed.logits.shape, stacked.shape):
            kept = self._memory = Computed(torch.empty_like(computed.logits), torch.empty_like(stacked))
        kept.logits.copy_(computed.logits)
        kept.stacked().copy_(stacked)
        return kept


def test_a_runtime_may_use_the_memory_of_its_outputs_again(plain_gpt2: Path) -> None:
    expected = run(open_engine(plain_gpt2, engine="torch", **SMALL), *jobs())
    assert_alike(run(engine_over(Reusing(network_of(plain_gpt2)), plain_gpt2), *jobs()), expected)


@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("tokens", [1, 3])
def test_new_tokens_are_stored_behind_those_of_their_row(rows: int, tokens: int) -> None:
    group = PastGroup(tuple(range(rows)), torch.zeros(4, rows, 2, 64, 5))
    starts = torch.randint(0, 64 - tokens, (rows,))
    new = torch.randn(4, rows, 2, tokens, 5)
    group.append(starts, new)
    for row, start in enumerate(starts.tolist()):
        assert torch.equal(group.buffer[:, row, :, start : start + tokens], new[:, row])
    assert torch.count_nonzero(group.buffer) == torch.count_nonzero(new)


def test_graphs_of_other_exporters_are_understood(plain_gpt2: Path) -> None:
    expected = run(open_engine(plain_gpt2, engine="torch", **SMALL), *jobs())
    assert_alike(run(engine_over(LikeOptimum(network_of(plain_gpt2)), plain_gpt2), *jobs()), expected)


@pytest.fixture(scope="module")
def torch_engine(plain_gpt2: Path) -> GenerationEngine:
    return open_engine(plain_gpt2, engine="torch", **SMALL)


@pytest.fixture(scope="module")
def engine(exported_gpt2: Path) -> GenerationEngine:
    return open_engine(exported_gpt2, engine="onnxruntime", **SMALL)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.9, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {5: 8.0, 9: -100.0}, "bad_sequences": ((3, 4), (5, 5))},
    ],
)
def test_the_sampler_is_that_of_the_torch_engine(
    engine: GenerationEngine, torch_engine: GenerationEngine, settings: dict[str, Any]
) -> None:
    assert_alike(run(engine, *jobs(**settings)), run(torch_engine, *jobs(**settings)))


def test_log_probabilities_of_prompts_are_those_of_the_torch_engine(
    engine: GenerationEngine, torch_engine: GenerationEngine
) -> None:
    found = []
    for each in (engine, torch_engine):
        scores: list[float] = []
        each.submit(job(0, PROMPTS[3], max_tokens=2, prompt_logprobs=1))
        while each.has_work():
            scores += [value for part in each.step().scores for value in part.logprobs]
        found.append(scores)
    assert len(found[0]) == len(PROMPTS[3]) - 1
    np.testing.assert_allclose(found[0], found[1], atol=TOLERANCE, rtol=0)


def test_a_paused_answer_is_computed_again_and_continues(exported_gpt2: Path, engine: GenerationEngine) -> None:
    alike = [job(key, prompt_of(60, seed=key, vocab=VOCAB), max_tokens=40, logprobs=2) for key in range(3)]
    expected = run(engine, *alike)
    narrow = open_engine(exported_gpt2, engine="onnxruntime", **{**SMALL, "kv_blocks": 16})
    assert_alike(run(narrow, *alike), expected)
    assert narrow.stats().preemptions > 0


def test_an_answer_that_another_worker_began_continues(engine: GenerationEngine) -> None:
    whole = solo(engine, job(0, PROMPTS[1], max_tokens=24)).tokens
    rest = solo(engine, job(1, PROMPTS[1], emitted=whole[:9], max_tokens=24)).tokens
    assert whole[:9] + rest == whole


def test_a_prefix_is_computed_once(plain_gpt2: Path) -> None:
    class Counting:
        """Counts the tokens that are computed."""

        def __init__(self) -> None:
            self.tokens, self._network = 0, network_of(plain_gpt2)

        def compute(self, call: Call) -> Computed:
            self.tokens += call.input_ids.numel()
            return self._network.compute(call)

    counted = Counting()
    engine = engine_over(counted, plain_gpt2)
    shared, tails = PROMPTS[3], ([5, 6, 7], [8, 9])
    asked = [job(key, [*shared, *tail], max_tokens=12, logprobs=2) for key, tail in enumerate(tails)]
    first, before = run(engine, asked[0]), counted.tokens
    second = run(engine, asked[1])
    whole = len(shared) // 16 * 16
    assert counted.tokens - before == len(shared) + 2 - whole + 11
    assert_alike(first | second, run(engine_over(network_of(plain_gpt2), plain_gpt2), *asked))


def test_rows_with_prefixes_of_others_are_computed_together(plain_gpt2: Path) -> None:
    asked = [job(key, [*PROMPTS[2], key, 7], max_tokens=12, logprobs=2) for key in range(4)]
    engine = engine_over(network_of(plain_gpt2), plain_gpt2)
    run(engine, job(9, [*PROMPTS[2], 3], max_tokens=2))
    expected = run(open_engine(plain_gpt2, engine="torch", **SMALL), *asked)
    assert_alike(run(engine, *asked), expected)


def test_blocks_have_the_contents_that_the_torch_engine_writes(plain_gpt2: Path) -> None:
    contents = []
    for engine in (open_engine(plain_gpt2, engine="torch", **SMALL), engine_over(network_of(plain_gpt2), plain_gpt2)):
        run(engine, job(0, PROMPTS[3], max_tokens=2))
        assert engine.runner.kv is not None
        contents.append([np.frombuffer(each, np.float32) for each in engine.runner.kv.read([1, 2, 3])])
    np.testing.assert_allclose(contents[0], contents[1], atol=1e-5)


def test_a_row_that_fails_fails_alone(plain_gpt2: Path) -> None:
    """A runtime may raise for a call; the engine divides it until one job is left."""
    network, poisoned = network_of(plain_gpt2), 7

    class Fragile:
        def compute(self, call: Call) -> Computed:
            if (call.input_ids == poisoned).any():
                raise RuntimeError("a shape that the runtime does not support")
            return network.compute(call)

    engine = engine_over(Fragile(), plain_gpt2)
    clean = [[2 + token % 5 for token in ids] for ids in PROMPTS[:3]]
    bias = {poisoned: -100.0}
    made = [job(key, ids, max_tokens=12, logit_bias=bias) for key, ids in enumerate([*clean, [3, poisoned]])]
    answers = run(engine, *made)
    assert answers[3].ended.reason is EndReason.ERROR
    expected = run(engine_over(network, plain_gpt2), *made[:3])
    assert [answers[key].tokens for key in range(3)] == [expected[key].tokens for key in range(3)]


def test_numbers_that_are_not_finite_end_their_row_alone(plain_gpt2: Path) -> None:
    network, poisoned = network_of(plain_gpt2), 7

    class Broken:
        def compute(self, call: Call) -> Computed:
            computed = network.compute(call)
            logits = computed.logits.clone()
            bad = (call.input_ids == poisoned).any(1)
            logits[bad[call.logits_at // call.input_ids.shape[1]]] = torch.nan
            return Computed(logits, computed.new)

    bias = {poisoned: -100.0}
    made = [job(key, ids, max_tokens=8, logit_bias=bias) for key, ids in enumerate([[2, 3], [poisoned, 4], [5]])]
    answers = run(engine_over(Broken(), plain_gpt2), *made)
    failure = answers[1].ended.error
    assert failure is not None
    assert failure.reason == "NUMERIC"
    assert [len(answers[key].tokens) for key in (0, 2)] == [8, 8]


def test_rows_are_computed_together_up_to_so_much_padding() -> None:
    assert divide([1, 1, 1, 5, 1], [10, 400, 390, 5, 12], padding_tokens=100) == [[1, 2], [4, 0], [3]]
    assert divide([1, 1], [10, 400], padding_tokens=390) == [[1, 0]]
    assert divide([], [], padding_tokens=1) == []


def test_rows_that_stay_together_are_not_copied_again(plain_gpt2: Path) -> None:
    engine = engine_over(network_of(plain_gpt2), plain_gpt2)
    runner = engine.runner
    assert isinstance(runner, RuntimeRunner)
    for key in range(2):
        engine.submit(job(key, PROMPTS[4], max_tokens=30))
    groups = []
    while engine.has_work():
        engine.step()
        groups += [group for group in [runner.past.held((0, 1))] if group is not None]
    assert len(groups) > 20
    assert all(group is groups[0] for group in groups)


# ---- refusals ----


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("deterministic", True),
        ("speculate", "ngram"),
        ("quantize", "int8"),
        ("dtype", "bfloat16"),
        ("kv_dtype", "int8"),
        ("kv_scales", "dynamic"),
        ("adapter_slots", 4),
    ],
)
def test_options_that_it_cannot_honour_are_refused_by_name(exported_gpt2: Path, option: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"ENGINE=onnxruntime cannot honour {option}: "):
        open_engine(exported_gpt2, engine="onnxruntime", **{option: value})


def test_settings_that_users_know_hold(exported_gpt2: Path) -> None:
    with pytest.raises(CheckpointError, match="max_seq_length 513 exceeds the model's context of 512"):
        open_engine(exported_gpt2, engine="onnxruntime", max_seq_length=513)
    engine = open_engine(exported_gpt2, engine="onnxruntime", max_seq_length=20, max_batch_size=2)
    assert solo(engine, job(0, PROMPTS[2])).ended.error is not None, "a prompt of 64 tokens"
    assert solo(engine, job(1, PROMPTS[1], max_tokens=9)).ended.reason is EndReason.LENGTH


def test_a_folder_without_an_export_is_refused(plain_gpt2: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model.onnx or onnx/model.onnx for ENGINE=onnxruntime in gpt2: weft"):
        open_engine(plain_gpt2, engine="onnxruntime")
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        export(plain_gpt2, plain_gpt2, "onnx", lambda *_: None)


def _without(graph: "onnx.GraphProto", name: str) -> None:
    for values in (graph.input, graph.output):
        for index, value in enumerate(values):
            if value.name == name:
                del values[index]
                return
    raise AssertionError(name)


def test_a_damaged_graph_is_refused_in_one_line(exported_gpt2: Path, tmp_path: Path) -> None:
    folder = copy_of(exported_gpt2, tmp_path / "damaged")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    _without(model.graph, "present.0.value")
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(CheckpointError, match=r"^model.onnx has no output present.0.value: a decoder with past needs"):
        open_engine(folder, engine="onnxruntime")
    (folder / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(CheckpointError, match=r"^model.onnx cannot be loaded by onnxruntime: "):
        open_engine(folder, engine="onnxruntime")


FREE = (None, None)
PAST = (None, 4, None, 16)
INPUTS = {
    **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), FREE),
    **dict.fromkeys(("past_key_values.0.key", "past_key_values.0.value"), PAST),
}
OUTPUTS = ("logits", "present.0.key", "present.0.value")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"position_ids": None}, "model.onnx has no input position_ids: a decoder with past needs it"),
        ({"past_key_values.0.value": None}, "model.onnx has no input past_key_values.0.value: "),
        ({"use_cache_branch": (1,)}, "model.onnx has an input use_cache_branch that nothing feeds"),
        ({"past_key_values.1.key": PAST}, "an input past_key_values.1.key that nothing feeds, or config.json is of an"),
        ({"input_ids": (1, None)}, r"input input_ids has shape \[1, 'any'\], \['any', 'any'\] is needed"),
        ({"past_key_values.0.key": (None, 2, None, 16)}, r"has shape \['any', 2, 'any', 16\], \['any', 4, 'any', 16\]"),
    ],
)
def test_signatures_that_cannot_be_called_are_refused(plain_gpt2: Path, change: Mapping[str, Any], reason: str) -> None:
    inputs = {name: shape for name, shape in {**INPUTS, **change}.items() if shape is not None}
    with pytest.raises(CheckpointError, match=reason):
        read_signature("model.onnx", inputs, OUTPUTS, load_config(plain_gpt2), 512)


def test_windows_in_graphs_of_other_exporters_bound_the_length(plain_gpt2: Path) -> None:
    """Such a graph counts the padding of a past among the last tokens."""
    windowed = dataclasses.replace(load_config(plain_gpt2), windows=(24,))
    with pytest.raises(CheckpointError, match="was not written by weft export: set MAX_SEQ_LENGTH to its window of 24"):
        read_signature("model.onnx", INPUTS, OUTPUTS, windowed, 512)
    assert not read_signature("model.onnx", INPUTS, OUTPUTS, windowed, 24).picks_logits


def test_an_export_keeps_the_settings_and_no_quantization(exported_gpt2: Path, plain_gpt2: Path) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        assert (exported_gpt2 / name).read_bytes() == (plain_gpt2 / name).read_bytes()
    assert "quantization_config" not in json.loads((exported_gpt2 / "config.json").read_text())


# ---- files of torch, and other runtimes ----


@pytest.fixture(scope="module")
def program(plain_gpt2: Path) -> Path:
    """A folder with what `weft export torch` wrote."""
    out = plain_gpt2.with_name("program")
    export(plain_gpt2, out, "torch", lambda *_: None)
    return out


def test_a_program_of_torch_export_answers_as_the_torch_engine(program: Path, torch_engine: GenerationEngine) -> None:
    engine = open_engine(program, engine="exported", **SMALL)
    assert_alike(run(engine, *jobs()), run(torch_engine, *jobs()))


def test_a_program_of_another_model_is_refused(program: Path, tmp_path: Path) -> None:
    folder = copy_of(program, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 2}))
    with pytest.raises(CheckpointError, match=r"^model.pt2 has no input past_key_values.1.key"):
        open_engine(folder, engine="exported")
    (folder / "model.pt2").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"^model.pt2 cannot be loaded by torch: "):
        open_engine(folder, engine="exported")


class Triple(torch.nn.Module):
    """Takes other arguments than a decoder with past."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * 3


@pytest.mark.filterwarnings("ignore")
def test_legacy_torchscript_modules_are_computed(
    plain_gpt2: Path, tmp_path: Path, torch_engine: GenerationEngine
) -> None:
    network, config = load_network(plain_gpt2, lambda *_: None)
    past = [torch.zeros(2, config.kv_heads, 5, config.head_dim) for _ in range(2 * config.layers)]
    places = torch.arange(5, 8).repeat(2, 1)
    example = (places, torch.ones(2, 8, dtype=torch.int64), places, torch.tensor([2, 5]), past)
    folder = copy_of(plain_gpt2, tmp_path / "script")
    torch.jit.trace(network, example).save(folder / "model.pt")  # type: ignore[no-untyped-call]
    engine = open_engine(folder, engine="exported", **SMALL)
    assert_alike(run(engine, *jobs()), run(torch_engine, *jobs()))
    torch.jit.script(Triple()).save(folder / "model.pt")  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError, match=r"^model.pt takes tokens; a decoder with past takes input_ids, "):
        open_engine(folder, engine="exported")


def test_packages_of_aotinductor_are_loaded_as_such(
    plain_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_engine: GenerationEngine
) -> None:
    """Compiling one takes minutes: the package is empty here, and its loader is a stand-in."""
    folder = copy_of(plain_gpt2, tmp_path / "package")
    with zipfile.ZipFile(folder / "model.pt2", "w") as archive:
        archive.writestr("model/data/aotinductor/model/code.so", b"")
    network = load_network(plain_gpt2, lambda *_: None)[0]
    loaded: list[str] = []

    def load(path: str) -> Any:
        loaded.append(path)
        return network

    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    engine = open_engine(folder, engine="exported", **SMALL)
    assert_alike(run(engine, *jobs()), run(torch_engine, *jobs()))
    assert loaded == [str(folder / "model.pt2")]


def test_a_checkpoint_is_compiled_for_sizes_of_any_number(
    plain_gpt2: Path, monkeypatch: pytest.MonkeyPatch, torch_engine: GenerationEngine
) -> None:
    """The compiler takes minutes: here it is a stand-in that computes the network as it is."""
    asked: list[bool | None] = []

    def stand_in(network: Any, dynamic: bool | None = None) -> Any:
        asked.append(dynamic)
        return network

    monkeypatch.setattr(torch, "compile", stand_in)
    phases: list[str] = []
    options = EngineOptions(engine="compile", **SMALL)
    engine = build_engine(plain_gpt2, options, lambda phase, *_: phases.append(phase)).engine
    assert asked == [True]
    assert "compile" in phases
    assert_alike(run(engine, *jobs()), run(torch_engine, *jobs()))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CheckpointError, match=r"ENGINE=compile needs a C\+\+ compiler: install g\+\+, or name one in"):
        open_engine(plain_gpt2, engine="compile")


@pytest.mark.parametrize("converted", [False, True])
def test_openvino_answers_as_the_torch_engine(
    exported_gpt2: Path, plain_gpt2: Path, torch_engine: GenerationEngine, converted: bool
) -> None:
    """It reads what `weft export onnx` wrote, and converts a checkpoint."""
    pytest.importorskip("openvino")
    engine = open_engine(plain_gpt2 if converted else exported_gpt2, engine="openvino", **SMALL)
    assert_alike(run(engine, *jobs()), run(torch_engine, *jobs()))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_openvino_multiplies_with_rounded_weights(checkpoint: Callable[[str], Path], kind: str) -> None:
    """With inputs in float32 it has the numbers of the dequantized weights."""
    pytest.importorskip("openvino")
    folder, rounded = checkpoint("llama"), {"quantize": kind, "quantize_head": "int8"}
    engine = open_engine(folder, engine="openvino", exact_inputs=True, **rounded, **SMALL)
    assert_alike(run(engine, *jobs()), run(engine_over(network_of(folder, **rounded), folder), *jobs()))


def _int4(zero: bool = False, order: bool = False) -> QuantizedWeight:
    weight = quantized_weights.quantize_int4(torch.randn(48, 96), 32)
    if zero:
        weight = dataclasses.replace(weight, zero=torch.randint(0, 16, weight.scale.shape, dtype=torch.uint8))
    return dataclasses.replace(weight, order=torch.randperm(96).int()) if order else weight


def _int8(groups: int) -> QuantizedWeight:
    return Int8Weight(torch.randint(-127, 128, (40, 96), dtype=torch.int8), torch.rand(40, groups))


@pytest.mark.parametrize(
    "make",
    [
        _int4,
        lambda: _int4(zero=True),
        lambda: _int4(zero=True).rows(0, 1),
        lambda: _int4(zero=True, order=True),
        lambda: _int8(1),
        lambda: _int8(3),
        lambda: StackedWeight((_int4(order=True), _int8(1), _int4())),
    ],
)
def test_openvino_holds_the_numbers_of_each_format(make: Callable[[], QuantizedWeight]) -> None:
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    weight, inputs = make(), openvino.opset13.parameter([-1, 96], np.float32)

    class Node:
        """A product with the first weight, as the converter hands it over."""

        def get_input(self, _: int) -> Any:
            return inputs.output(0)

        def get_values_from_const_input(self, _: int) -> int:
            return 0

    (made,) = Products(openvino, [weight]).convert(Node())
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = openvino.Core().compile_model(openvino.Model([made], [inputs], "product"), "CPU", exact)
    x = torch.randn(5, 96)
    np.testing.assert_allclose(compiled([x.numpy()])[0], x @ weight.dequantize(torch.float32).T, rtol=1e-5, atol=1e-4)


def test_weights_whose_inputs_are_rounded_by_row_become_plain() -> None:
    values, scale = torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1)
    rounded, ops = Int8Weight(values, scale, dynamic_activations=True), RoundedOps()
    assert isinstance(ops.prepare(rounded, torch.float32), torch.Tensor)
    assert not ops.weights
    assert ops.prepare(dataclasses.replace(rounded, dynamic_activations=False), torch.float32).nbytes == 4 * 8 + 4 * 4


def test_what_is_rounded_by_the_exporter_is_not_rounded_again(exported_gpt2: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.onnx cannot be rounded: weights are rounded when they are expor"):
        open_engine(exported_gpt2, engine="openvino", quantize="int4")
    with pytest.raises(CheckpointError, match=r"ENGINE=openvino cannot honour quantize=fp8: it multiplies with int8"):
        open_engine(exported_gpt2, engine="openvino", quantize="fp8")
    with pytest.raises(CheckpointError, match=r"model.onnx says how it is multiplied: exact_inputs is for a checkpoin"):
        open_engine(exported_gpt2, engine="openvino", exact_inputs=True)


def test_openvino_rounds_inputs_as_finely_as_torch_does(checkpoint: Callable[[str], Path]) -> None:
    """Logits of one prompt: int4 in torch rounds inputs to bfloat16, openvino to 8 bits in groups of 32."""
    pytest.importorskip("openvino")
    folder, errors = checkpoint("llama"), {}
    expected = engine_over(network_of(folder, quantize="int4"), folder).runner.inspect(PROMPTS[3]).logits()
    for name in ("torch", "openvino"):
        found = open_engine(folder, engine=name, quantize="int4", **SMALL).runner.inspect(PROMPTS[3]).logits()
        errors[name] = float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())
    assert errors["openvino"] < 3 * errors["torch"] < 0.1, errors


@pytest.mark.parametrize(("engine", "folder"), [("onnxruntime", "exported_gpt2"), ("openvino", "exported_gpt2")])
def test_a_runtime_that_is_not_installed_is_named(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, engine: str, folder: str
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(CheckpointError, match=rf"{engine} is not installed: pip install 'weft\[{engine}\]'"):
        open_engine(request.getfixturevalue(folder), engine=engine)
