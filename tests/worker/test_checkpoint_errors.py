"""Each defect of a checkpoint is reported in one line, and the model is not served."""

import contextlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import utils
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from services.worker.build.choose import build_engine
from services.worker.build.weights import open_source
from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from services.worker.loader import presets
from services.worker.loader.checkpoint import FILES, OTHER_FILES, fingerprint, locate, read_bundle, start_hashing
from services.worker.loader.config import load_config
from services.worker.loader.tensors import open_checkpoint
from services.worker.loader.weight_files import INDEX, SINGLE, weight_files
from services.worker.models.rope_settings import LinearScaling, Rope
from services.worker.options import EngineOptions
from tests.checkpoints import EOS, VOCAB, Damage, pipe
from tests.worker.drive import job, open_engine, prompt_of, solo


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that a test may damage."""

    def make(shape: str) -> Path:
        return Path(shutil.copytree(checkpoint(shape), tmp_path / shape))

    return make


def load(folder: Path) -> GenerationEngine:
    return open_engine(folder, kv_blocks=8)


def edit_config(file: str = "config.json", **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE, {"format": "pt"})

    return damage


def edit_header(**changes: Any) -> Damage:
    """Changes the entry of a tensor in the header of its file."""

    def damage(folder: Path) -> None:
        content = (folder / SINGLE).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        header[Q].update(changes)
        made = json.dumps(header).encode()
        (folder / SINGLE).write_bytes(len(made).to_bytes(8, "little") + made + content[end:])

    return damage


def truncate(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: len(content) // 2])


def pickle_only(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def gguf_only(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "tiny.gguf")


def no_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()


def nonsense(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"\xff" * 64)


def broken_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def endless(file: str, before: bytes = b"") -> Damage:
    """Replaces a file by a million nested lists."""

    def damage(folder: Path) -> None:
        (folder / file).write_bytes(before + b"[" * 10**6)

    return damage


def listening(folder: Path) -> None:
    """Replaces the weights by a socket."""
    (folder / SINGLE).unlink()
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as opened:
        opened.bind(SINGLE)


def device(folder: Path) -> None:
    """Replaces config.json by a link to a device."""
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/null")


def scale_of_layer(layer: int | str) -> Damage:
    return edit_tensors(lambda t: t.update({f"model.layers.{layer}.self_attn.k_scale": torch.ones(1)}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


Q = "model.layers.1.self_attn.q_proj.weight"
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0] * 8}
PARTIAL = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
LLAMA3_WITHOUT_FACTOR = {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "truncated"),
        (nonsense, "truncated or not a safetensors file"),
        (pickle_only, "pytorch_model.bin, which is a pickle"),
        (gguf_only, "found only tiny.gguf, which is of a format that is not read"),
        (no_weights, "found no weights"),
        (no_config, "config.json is missing"),
        (pipe("config.json"), "config.json is not a regular file"),
        (pipe("generation_config.json"), "generation_config.json is not a regular file"),
        (pipe(SINGLE), f"{SINGLE} is not a regular file"),
        (listening, f"{SINGLE} is not a regular file"),
        (device, "config.json is not a regular file"),
        (scale_of_layer(3), "tensor model.layers.3.self_attn.k_scale is not part of this architecture"),
        (scale_of_layer("02"), "tensor model.layers.02.self_attn.k_scale is not part of this architecture"),
        (scale_of_layer("9" * 5000), "tensor model.layers.9999"),
        (broken_json, "config.json cannot be read"),
        (edit_tensors(lambda t: t.pop(Q)), f"tensor {Q} is missing"),
        (edit_tensors(lambda t: t.update({Q: t[Q][:-1].clone()})), f"tensor {Q} has shape [63, 64]"),
        (edit_tensors(lambda t: t.update({Q: t[Q].to(torch.int8)})), f"tensor {Q} has type I8"),
        (edit_tensors(lambda t: t[Q].view(-1)[7].fill_(torch.nan)), f"tensor {Q} holds numbers that are not finite"),
        (edit_tensors(lambda t: t[Q].view(-1)[7].fill_(torch.inf)), f"tensor {Q} holds numbers that are not finite"),
        (edit_tensors(lambda t: t.update(extra=torch.ones(2))), "tensor extra is not part of this architecture"),
        (edit_config(architectures=["MambaForCausalLM"]), "architecture MambaForCausalLM is not supported"),
        (edit_config(architectures=["MPNetModel"]), "Qwen3MoeForCausalLM, and encoders: Bert, Roberta, XLMRoberta,"),
        (edit_config(head_dim=15), "head_dim 15 is odd, but positions rotate pairs of dimensions"),
        (edit_config(architectures=None), "architecture none is not supported"),
        (edit_config(rope_parameters=PROPORTIONAL), "rope scaling proportional is not supported"),
        (edit_config(rope_parameters=LONGROPE), "short_factor must be a list of 8 numbers"),
        (edit_config(rope_parameters=PARTIAL), "partial_rotary_factor is not supported"),
        (edit_config(rope_parameters=LLAMA3_WITHOUT_FACTOR), "factor is missing"),
        (edit_config(rope_parameters={"rope_theta": math.nan}), "rope_theta must be a positive number"),
        (edit_config(rope_parameters={"rope_theta": 0}), "rope_theta must be a positive number"),
        (edit_config(rope_scaling={"type": "yarn", "factor": 4.0}), "rope_scaling and rope_parameters differ"),
        (edit_config(hidden_act="gelu"), "hidden_act gelu is not supported"),
        (edit_config(quantization_config={"quant_method": "hqq"}), "quant_method hqq is not supported"),
        (edit_config(num_key_value_heads=3), "4 attention heads cannot share 3 key/value heads"),
        (edit_config(num_hidden_layers=4), "tensor model.layers.3."),
        (edit_config(num_hidden_layers=-1), "num_hidden_layers must be a positive whole number"),
        (edit_config(vocab_size="many"), "vocab_size must be a positive whole number"),
        (edit_config(partial_rotary_factor=0.5), "partial_rotary_factor is not supported"),
        (edit_config(architectures=7), "architecture none is not supported"),
        (edit_config(num_key_value_heads="x"), "num_key_value_heads must be a positive whole number"),
        (edit_config(num_attention_heads=0.5), "num_attention_heads must be a positive whole number"),
        (edit_config(rms_norm_eps=None), "rms_norm_eps is missing"),
        (edit_config(rms_norm_eps="small"), "rms_norm_eps must be a positive number"),
        (edit_config(head_dim=-16), "head_dim must be a positive whole number"),
        (edit_config(num_hidden_layers=math.nan), "num_hidden_layers must be a positive whole number"),
        (edit_config(num_hidden_layers=10**5), "num_hidden_layers must be a positive whole number of at most 1,024"),
        (edit_config(hidden_size=10**400), "hidden_size must be a positive whole number"),
        (edit_config(rms_norm_eps=10**400), "rms_norm_eps must be a positive number"),
        (edit_config(tie_word_embeddings="false"), "tie_word_embeddings must be true or false"),
        (edit_config(architectures=["a\nb"]), "architecture a b is not supported"),
        (edit_config(architectures=["a" * 10**6]), "aaa..."),
        (edit_config(rope_parameters="x"), "rope_parameters is not an object"),
        (edit_config(rope_parameters=None, rope_scaling=[1]), "rope_scaling is not an object"),
        (edit_config(quantization_config="fp8"), "quantization_config is not an object"),
        (
            edit_config("generation_config.json", eos_token_id="end"),
            "eos_token_id is neither a token nor a list of tokens",
        ),
        (edit_header(data_offsets=["a", "b"]), f"describes tensor {Q} badly"),
        (edit_header(data_offsets=[-8, 8]), f"describes tensor {Q} badly"),
        (edit_header(data_offsets=[0, 10**400]), f"truncated: tensor {Q} ends at byte 1000"),
        (edit_header(shape=[math.inf]), f"describes tensor {Q} badly"),
        (edit_header(shape=[10**30]), f"tensor {Q} of shape [1{'0' * 30}] has"),
        (edit_header(dtype=[]), f"tensor {Q} has type []"),
        (endless("config.json"), "config.json cannot be read: RecursionError"),
        (endless("generation_config.json"), "generation_config.json cannot be read: RecursionError"),
        (endless(SINGLE, (10**6).to_bytes(8, "little")), f"{SINGLE} cannot be read: RecursionError"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_its_reason(
    copy: Callable[[str], Path], damage: Damage, reason: str
) -> None:
    folder = copy("llama")
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(folder) not in str(caught.value), "the message contains no path"


def test_a_fingerprint_does_not_block_at_a_pipe(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    with start_hashing(folder) as digests:
        before = fingerprint(digests)
    os.mkfifo(folder / "more.safetensors")
    with start_hashing(folder) as digests:
        assert fingerprint(digests) == before


def missing_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def index_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][Q] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def index_knows_more(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.more"] = next(iter(index["weight_map"].values()))
    (folder / INDEX).write_text(json.dumps(index))


def index_is_empty(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (missing_shard, "shard model-00002-of-0000"),
        (index_outside, "names a file outside the checkpoint"),
        (index_knows_more, "tensor model.more is in the index but in no file"),
        (index_is_empty, "names no tensors"),
        (pipe(INDEX), f"{INDEX} is not a regular file"),
        (endless(INDEX), f"{INDEX} cannot be read: RecursionError"),
    ],
)
def test_a_damaged_sharded_checkpoint_is_refused(copy: Callable[[str], Path], damage: Damage, reason: str) -> None:
    folder = copy("qwen3")
    damage(folder)
    with pytest.raises(CheckpointError, match=reason):
        load(folder)


@pytest.mark.parametrize("name", ["models/int4--v2", "models/my model", "./missing", "missing"])
def test_a_missing_folder_is_reported_in_one_line(name: str) -> None:
    """The same holds for a name that is no valid hub id."""
    with pytest.raises(CheckpointError, match=r"no checkpoint folder|neither a folder nor to be had"):
        locate(name)


@pytest.mark.parametrize("settings", [{"bos_token": 5}, {"chat_template": [{"a": "b"}]}, {"chat_template": 7}])
def test_invalid_tokenizer_settings_are_one_line(copy: Callable[[str], Path], settings: dict[str, Any]) -> None:
    folder = copy("llama")
    edit_config("tokenizer_config.json", **settings)(folder)
    with pytest.raises(CheckpointError, match="chat template or special tokens cannot be read"):
        read_bundle(folder)


@pytest.mark.parametrize("described", [{}, {"added_tokens_decoder": {}}])
def test_special_tokens_are_those_of_transformers(copy: Callable[[str], Path], described: dict[str, Any]) -> None:
    """Earlier versions of transformers name them in a file of their own."""
    folder = copy("llama")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind, **described}))
    named = {"bos_token": {"content": "<s>", "lstrip": False, "rstrip": False}, "pad_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert dict(read_bundle(folder).special_tokens) == tokenizer.special_tokens_map


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "tokenizer.json cannot be read: JSONDecodeError"),
        ("[" * 10**6, "tokenizer.json cannot be read: RecursionError"),
        ("[]", "tokenizer.json describes no tokenizer"),
        ('{"model": {}}', "tokenizer.json cannot be used: "),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}', "tokenizer.json cannot be used: "),
        ('{"version": "1.0", "model": {"type": "Unheard"}}', "tokenizer.json cannot be used: "),
    ],
)
def test_an_unusable_tokenizer_is_reported_in_one_line(copy: Callable[[str], Path], content: str, reason: str) -> None:
    folder = copy("llama")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=reason):
        read_bundle(folder)


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages", "{{ messages | no_such_filter }}", "{% unheard %}"])
def test_a_template_that_does_not_compile_is_reported_in_one_line(copy: Callable[[str], Path], template: str) -> None:
    folder = copy("llama")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match="the chat template does not compile: ") as caught:
        read_bundle(folder)
    assert "\n" not in str(caught.value)


def test_templates_that_the_gateway_supports_compile(copy: Callable[[str], Path]) -> None:
    """Loop controls, `generation` blocks of transformers, and functions that exist only when a template is rendered."""
    folder = copy("llama")
    template = "{% for m in messages %}{% if not m %}{% break %}{% endif %}{% generation %}{{ m | tojson }}"
    template += "{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}{{ raise_exception('no') }}"
    (folder / "chat_template.jinja").write_text(template)
    assert read_bundle(folder).chat_template == template


REMOVED = """
import os
from services.worker.loader import presets
folders = [presets.folder_of("random:tiny").parent for _ in range(2)]
assert all(folder.is_dir() for folder in folders)
print(*folders)
"""


def test_a_presets_folder_does_not_outlive_its_process() -> None:
    done = subprocess.run([sys.executable, "-c", REMOVED], capture_output=True, text=True, check=True)
    folders = [Path(name) for name in done.stdout.split()]
    assert [folder.name.startswith("weft-random-") for folder in folders] == [True, True]
    assert not any(folder.exists() for folder in folders)


def test_a_presets_folder_is_removed_after_its_model_is_loaded() -> None:
    folder = locate("random:tiny")
    assert load(folder).memory.weights > 0
    presets.remove_folders()
    assert not folder.parent.exists()


def test_no_second_copy_of_the_weights_is_downloaded() -> None:
    """A repository like Mistral's has the weights twice; the patterns are applied by the hub's own function."""
    held = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
    others = ["consolidated.safetensors", "original/params.json", "onnx/model.safetensors", "model.bin"]
    hub: Any = utils
    fetched = hub.filter_repo_objects([*held, *others], allow_patterns=FILES, ignore_patterns=OTHER_FILES)
    assert list(fetched) == held


def test_loading_reports_its_phases_and_shards(checkpoint: Callable[[str], Path]) -> None:
    reported: list[tuple[str, int, int]] = []
    build_engine(checkpoint("qwen3"), EngineOptions(kv_blocks=8), lambda *progress: reported.append(progress))
    shards = len(open_checkpoint(checkpoint("qwen3")).shards)
    assert shards > 2
    assert [done for phase, done, _ in reported if phase == "weights"] == list(range(shards + 1))
    assert list(dict.fromkeys(phase for phase, _, _ in reported)) == ["checkpoint", "weights", "warm-up"]
    assert all(0 <= done <= total for _, done, total in reported)


def test_the_older_form_of_rope_settings_is_read(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-bias-rope")
    new = load_config(folder).positions
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    settings = raw.pop("rope_parameters")
    raw["rope_theta"] = settings.pop("rope_theta")
    raw["rope_scaling"] = settings
    path.write_text(json.dumps(raw))
    assert load_config(folder).positions == new
    raw["rope_scaling"] = {"type": "linear", "factor": 2.0}
    path.write_text(json.dumps(raw))
    older = load_config(folder).positions
    assert older == Rope(10000.0, LinearScaling(2.0))


def test_end_tokens_come_from_the_generation_settings_first(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit_config(eos_token_id=7)(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_config(folder).eos_token_ids == (3, 4)
    (folder / "generation_config.json").unlink()
    assert load_config(folder).eos_token_ids == (7,)


def test_end_tokens_beyond_the_vocabulary_are_left_out(copy: Callable[[str], Path]) -> None:
    """min_tokens forbids the end tokens in each row of logits."""
    folder = copy("llama")
    edit_config("generation_config.json", eos_token_id=[EOS, VOCAB, 2**40])(folder)
    engine = open_engine(folder, engine="torch", kv_blocks=8)
    answer = solo(engine, job(1, [5, 6], max_tokens=4, ignore_eos=False, min_tokens=3))
    assert (load_config(folder).eos_token_ids, len(answer.tokens)) == ((EOS,), 4)


def test_windows_follow_each_familys_rule(copy: Callable[[str], Path]) -> None:
    assert load_config(copy("llama")).windows == (None, None, None)
    assert load_config(copy("mistral-window")).windows == (24, 24, 24)
    folder = copy("qwen2-window")
    assert load_config(folder).windows == (None, 20, 20)
    edit_config(layer_types=None)(folder)
    assert load_config(folder).windows == (None, 20, 20)
    edit_config(use_sliding_window=False)(folder)
    assert load_config(folder).windows == (None, None, None)


@pytest.mark.parametrize("windowless", [None, 0, 1, 2])
def test_layers_without_a_window_are_those_of_transformers(copy: Callable[[str], Path], windowless: int | None) -> None:
    folder = copy("qwen2-window")
    edit_config(layer_types=None)(folder)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("max_window_layers")
    path.write_text(json.dumps(raw if windowless is None else {**raw, "max_window_layers": windowless}))
    oracle = AutoConfig.from_pretrained(folder).layer_types
    got = ["full_attention" if window is None else "sliding_attention" for window in load_config(folder).windows]
    assert got == oracle


def test_a_number_of_windowless_layers_is_one(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen2-window")
    edit_config(max_window_layers="x")(folder)
    with pytest.raises(CheckpointError, match="max_window_layers must be a positive whole number"):
        load_config(folder)


def test_a_config_is_read_once_until_it_changes(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    first = load_config(folder)
    assert load_config(folder) is first
    edit_config(num_hidden_layers=first.layers + 1)(folder)
    assert load_config(folder).layers == first.layers + 1
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_config(folder).eos_token_ids == (7,)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(folder)


def as_transformers(folder: Path) -> None:
    """Asserts that the logits of a prompt are those of transformers."""
    prompt = prompt_of(24)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(torch.from_numpy(load(folder).runner.inspect(prompt).logits()), expected)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}])
def test_a_head_of_its_own_is_served_though_config_json_ties_it(
    copy: Callable[[str], Path], options: dict[str, Any]
) -> None:
    """Training that begins with a tied head may leave another one beside the embedding, and config.json as it was."""
    folder = copy("llama")
    untied = solo(open_engine(folder, kv_blocks=8, **options), job(1, prompt_of(24)))
    edit_config(tie_word_embeddings=True)(folder)
    found = solo(open_engine(folder, kv_blocks=8, **options), job(1, prompt_of(24)))
    assert found.tokens == untied.tokens
    as_transformers(folder)


def test_a_stored_copy_of_the_embedding_is_no_head_of_its_own(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit_config(tie_word_embeddings=True)(folder)
    edit_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(folder)
    assert open_source(folder, EngineOptions()).config.tied_embeddings
    as_transformers(folder)


@pytest.mark.parametrize("complete", [False, True], ids=["without its shards", "with its shards"])
def test_an_index_makes_way_for_a_single_file(copy: Callable[[str], Path], complete: bool) -> None:
    """transformers reads the single file, and leaves the index where it saves one into the folder of a sharded
    checkpoint."""
    folder = copy("qwen3")
    shards = {path: path.read_bytes() for path in folder.glob("model-*.safetensors")}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)  # The single file has other numbers than the shards.
    model.save_pretrained(folder)
    for path, data in shards.items():
        if complete:
            path.write_bytes(data)
    assert (folder / INDEX).exists()
    assert [path.name for path in weight_files(folder)] == [SINGLE]
    as_transformers(folder)
