"""How to run a model, as plain values: each option is defined here once. Knows no torch, and not who reads them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from services.worker.numerics import Numerics

Progress = Callable[[str, int, int], None]
"""progress(phase, done, total) is called during the start of an engine."""


def known_as(name: str) -> AliasChoices:
    """The environment variable `name`, which users of other servers know, with or without WEFT_ before it."""
    return AliasChoices(name, f"WEFT_{name}", name.lower())


class EngineOptions(BaseModel):
    """How to run a model. As part of `WorkerSettings` each option is read from the environment."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, extra="forbid")

    engine: Literal["auto", "gpu", "torch", "paced"] = Field(
        "auto",
        validation_alias=known_as("ENGINE"),
        description="What computes: gpu, or plain torch on the CPU; auto takes the GPU if there is one. paced only "
        "pretends, at a set pace.",
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
        512, ge=1, description="Most tokens computed in one engine step; on a GPU 8192 unless set."
    )
    chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Beside many running answers, prompt tokens of a step when one prompt waits (n prompts: n * n "
        "times as many); on a GPU 200 unless set. Less keeps answers even, more computes prompts sooner.",
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
    kv_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        validation_alias=known_as("KV_DTYPE"),
        description="Of stored keys and values; auto is what the checkpoint was calibrated for, or dtype. fp8 holds "
        "twice the tokens of bfloat16, int8 nearly so (a scale for each token and head).",
    )
    kv_scales: Literal["checkpoint", "dynamic"] = Field(
        "checkpoint",
        validation_alias=known_as("KV_SCALES"),
        description="Of keys and values in fp8, by head: what the checkpoint says, else 1; dynamic measures them at "
        "the start, by a prompt of 256 random tokens, unless the checkpoint brings any.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; absent: torch's choice.")
    paced_step_ms: float = Field(10.0, ge=0, description="Milliseconds of a step of the paced engine.")
    paced_prefill_rate: float = Field(
        0.0, ge=0, description="Prompt tokens that the paced engine computes in a second; 0: any number."
    )

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
        return Numerics(
            dtype=dtype,
            device=device,
            threads=threads,
            deterministic=self.deterministic,
            weights=self.quantize or "",
            kv_dtype=self.kv_dtype,
            kv_scales=self.kv_scales,
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
