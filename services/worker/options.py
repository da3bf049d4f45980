"""How to run a model, as plain values: each option is defined here once. Knows no torch, and not who reads them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from services.worker.numerics import Numerics

SPECULATE = r"^(ngram|suffix|draft:.+|heads:.+)?$"
SPECULATORS = "ngram, suffix, draft:MODEL, heads:PATH"
"""The pattern of `speculate`, and its values for people."""
DEFAULT_SLOTS = 8
ADAPTER_NAME = r"[A-Za-z0-9._-]{1,64}"
RUNTIMES = ("onnxruntime", "openvino", "tensorrt", "exported", "compile")
"""Engines that compute a decoder in another runtime, or as a graph."""
Progress = Callable[[str, int, int], None]
"""progress(phase, done, total) is called during the start of an engine."""


def known_as(name: str) -> AliasChoices:
    """The environment variable `name`, which users of other servers know, with or without WEFT_ before it."""
    return AliasChoices(name, f"WEFT_{name}", name.lower())


class EngineOptions(BaseModel):
    """How to run a model. As part of `WorkerSettings` each option is read from the environment."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, extra="forbid")

    engine: Literal["auto", "gpu", "torch", "onnxruntime", "openvino", "tensorrt", "exported", "compile", "paced"] = (
        Field(
            "auto",
            validation_alias=known_as("ENGINE"),
            description="What computes (docs/engines.md). auto: the GPU if there is one; else openvino for weights "
            "rounded to int8 or int4, where it is installed and can do all that is asked; else torch, with onnxruntime "
            "for lone texts where it is faster. paced only pretends, at a set pace.",
        )
    )
    max_batch_size: int = Field(
        64,
        ge=1,
        le=4096,
        validation_alias=known_as("MAX_BATCH_SIZE"),
        description="Most sequences in the batch; on a GPU 256 unless set.",
    )
    max_seq_length: int | None = Field(
        None,
        ge=2,
        validation_alias=known_as("MAX_SEQ_LENGTH"),
        description="Most tokens of prompt and answer; absent: the model's context.",
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    kv_bytes: int | None = Field(None, ge=1, description="Bytes of the KV pool; absent: sized from the free memory.")
    kv_blocks: int | None = Field(None, ge=1, description="Blocks of the KV pool; wins over kv_bytes.")
    step_tokens: int = Field(
        512,
        ge=1,
        description="Most tokens computed in one engine step; on a GPU 8192 unless set, for an encoder 32768.",
    )
    chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Beside many running answers, prompt tokens of a step when one prompt waits (n prompts: n * n "
        "times as many); on a GPU 200 unless set. Less keeps answers even, more computes prompts sooner.",
    )
    max_wait_ms: float = Field(
        5.0,
        ge=0,
        le=1000,
        validation_alias=known_as("MAX_WAIT_MS"),
        description="Milliseconds that an encoder's batch waits for more texts at the most; a full one does not wait, "
        "nor does one for which no more are expected. On a GPU 1 unless set.",
    )
    prefix_cache: bool = Field(True, description="Keep computed prefixes for later requests.")
    host_kv_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of host memory for prefixes that the KV pool evicts. The CPU engine's pool is host memory: "
        "a larger kv_bytes does more there.",
    )
    deterministic: bool = Field(False, description="Logits do not depend on the batch, at some cost in speed.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and activations; auto is float32, on a GPU bfloat16."
    )
    quantize: Literal["int8", "int4", "fp8", "nf4"] | None = Field(
        None,
        validation_alias=known_as("QUANTIZE"),
        description="Round the weights of a plain checkpoint as they come in; absent: serve them as they are.",
    )
    quantize_head: Literal["int8"] | None = Field(
        None,
        description="On a CPU: round the head, too, or a copy of the embedding where this is the head. Absent: it "
        "stays as it is; in a small model with int4 weights it is half of what a token reads.",
    )
    exact_inputs: bool = Field(
        False,
        description="The openvino engine multiplies rounded weights with inputs in float32. Otherwise it rounds the "
        "inputs, too, to 8 bits in groups of 64, and is up to twice as fast. auto chooses torch instead, which "
        "rounds none below 16 bits.",
    )
    kv_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        validation_alias=known_as("KV_DTYPE"),
        description="Type of stored keys and values; auto is what the checkpoint was calibrated for, or dtype. fp8 "
        "holds twice the tokens of bfloat16, int8 nearly so (a scale for each token and head).",
    )
    kv_scales: Literal["checkpoint", "dynamic"] = Field(
        "checkpoint",
        validation_alias=known_as("KV_SCALES"),
        description="Scales of keys and values in fp8, by head: those of the checkpoint, else 1; dynamic measures "
        "them at the start, by a prompt of 256 random tokens, unless the checkpoint has any.",
    )
    fetch_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Type of keys and values on the way from worker to worker over gRPC; auto is that of the pool. fp8 "
        "rounds those of 16 and 32 bits, for slow links. It may change tokens: all workers of a model have the same, "
        "and deterministic mode refuses it.",
    )
    speculate: str = Field(
        "",
        pattern=SPECULATE,
        description="The proposer of draft tokens, of which a step verifies several at a time: ngram (what followed "
        "the last tokens before), suffix (also in the tenant's earlier answers), "
        "draft:MODEL (a small model of the same vocabulary; one with a pard_token makes all guesses in one pass), "
        "heads:PATH (heads that `weft compress heads` trained on the model's hidden states). It changes no token. "
        "Empty: none.",
    )
    speculate_depth: int | None = Field(
        None, ge=1, le=8, description="Guesses for each answer and step; absent: chosen by what is measured, down to 0."
    )
    draft_quantize: Literal["int8", "int4", "fp8", "nf4"] | None = Field(
        None,
        description="Round the draft model's weights as they come in, its head included, or a copy of the embedding "
        "where this is the head: the head to int8 on a CPU and with nf4. Absent: serve them as they are.",
    )
    adapter_slots: int | None = Field(
        None,
        ge=0,
        le=1024,
        validation_alias=known_as("MAX_LORAS"),
        description="Adapters that device memory holds at a time, the least recently used one makes room; 0: none are "
        "served. Absent: 8; on a GPU only if adapters are given at the start, because their memory is reserved.",
    )
    adapter_rank: int = Field(
        16,
        ge=1,
        le=256,
        validation_alias=known_as("MAX_LORA_RANK"),
        description="Largest rank of an adapter.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that share each layer: heads, neurons and vocabulary. On GPUs each has one.",
    )
    pipeline_parallel: int = Field(
        1, ge=1, le=64, description="Stages of layers, each computed by processes of its own."
    )
    expert_parallel: bool = Field(
        False,
        description="The tensor ranks of a mixture of experts have whole experts, spread over them; otherwise each has "
        "some neurons of every expert.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the engine; absent: one for each 16 MiB of weights, at most torch's choice. An "
        "encoder in torch computes two batches at a time, from 12 cores on three and from 16 on four, which share the "
        "cores out; other engines take all cores but one for it, onnxruntime all.",
    )
    paced_step_ms: float = Field(10.0, ge=0, description="Milliseconds of a step of the paced engine.")
    paced_prefill_rate: float = Field(
        0.0, ge=0, description="Prompt tokens that the paced engine computes in a second; 0: any number."
    )

    paced_acceptance: float = Field(
        0.7, ge=0, le=1, description="How often a guess of the paced engine's draft model, which it pretends, is right."
    )

    @property
    def draft(self) -> str:
        """The model that guesses; empty: none does."""
        name, _, model = self.speculate.partition(":")
        return model if name == "draft" else ""

    @property
    def heads(self) -> str:
        """The folder of draft heads that guess; empty: none do."""
        name, _, place = self.speculate.partition(":")
        return place if name == "heads" else ""

    @property
    def adapter_room(self) -> int:
        """Adapters that device memory holds at a time."""
        return self.adapter_slots if self.adapter_slots is not None else 0 if self.on_gpu else DEFAULT_SLOTS

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.engine == "gpu"

    @property
    def numerics(self) -> Numerics:
        """What the bits of a token depend on, as far as it is known before the checkpoint is read."""
        dtype = ("bfloat16" if self.on_gpu else "float32") if self.dtype == "auto" else self.dtype
        device = self.engine if self.engine in ("gpu", "paced") else "cpu"
        # Without the mode no bits are promised, whatever the number of threads.
        threads = self.threads or 1 if self.deterministic and device == "cpu" else 0
        shard = "0of1" if self.tensor_parallel == 1 else f"tensor{self.tensor_parallel}"
        return Numerics(
            dtype=dtype,
            device=device,
            threads=threads,
            deterministic=self.deterministic,
            weights=(self.quantize or "")
            + (f", head {self.quantize_head}" if self.quantize_head else "")
            + (", exact inputs" if self.exact_inputs else ""),
            kv_dtype=self.kv_dtype,
            kv_scales=self.kv_scales,
            fetch_dtype=self.fetch_dtype,
            shard=shard + ("+experts" if self.expert_parallel else ""),
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes, in bytes."""

    weights: int
    kv: int
    workspace: int
    available: int
    """Free memory before loading."""
    kv_blocks: int
    kv_tokens: int
    """Tokens that the KV pool holds."""
    max_seq_length: int
    """Most tokens of prompt and answer."""

    @property
    def concurrency(self) -> float:
        """Sequences of full length that the KV pool holds."""
        return self.kv_tokens / self.max_seq_length

    def __str__(self) -> str:
        return (
            f"weights {mib(self.weights)}, KV {mib(self.kv)} ({self.kv_tokens} tokens, {self.concurrency:.1f} "
            f"sequences of {self.max_seq_length}), workspace {mib(self.workspace)}, free {mib(self.available)}"
        )


def mib(count: int) -> str:
    """A number of bytes in MiB, for people."""
    return f"{count / 2**20:.0f} MiB"
