"""How to run a model, as plain values. Knows no torch and no settings."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a model."""

    block_size: int = 16
    """Tokens per KV block."""
    kv_blocks: int | None = None
    """Blocks of the KV pool; None: from kv_bytes."""
    kv_bytes: int | None = None
    """Bytes of the KV pool; None: what a full batch of full sequences needs, at most a quarter of the free memory."""
    max_batch_size: int = 64
    """Most jobs in the batch."""
    max_seq_length: int | None = None
    """Most tokens of prompt and answer; None: the model's context."""
    step_tokens: int = 512
    """Most tokens of one step: prompts are computed in chunks beside the running answers."""
    chunk_tokens: int | None = None
    """Beside many running answers, prompt tokens of a step when one prompt is in line, about; None: no such bound."""
    device: str = "cpu"
    """What computes: cpu or cuda."""
    graphs: bool = True
    """Capture the steps of a GPU as CUDA graphs."""
    compile_ahead: bool = False
    """Compile a GPU's kernels in processes beside the loading, where the cache on disk lacks them."""
    deterministic: bool = False
    """Logits do not depend on the batch, on chunking or on prefix hits."""
    dtype: str = "float32"
    """Of weights and activations: float32, bfloat16 or float16."""
    kv_dtype: str = "auto"
    """Of stored keys and values: auto (what the checkpoint says, or `dtype`), fp8 or int8."""
    kv_scales: str = "checkpoint"
    """Of keys and values in fp8, by head: checkpoint (what it says, else 1), or dynamic (measured at the start, unless
    the checkpoint brings any)."""
    quantize: str | None = None
    """What the weights of products are rounded to as they come in: int8, int4, fp8 or nf4; None: they stay."""
    threads: int | None = None
    """CPU threads; None: torch's choice, or one in deterministic mode (workers agree on bits if they agree on this)."""
    prefix_cache: bool = True
    """Keep computed blocks for later jobs with the same prefix."""
    host_kv_bytes: int = 0
    """Host memory for blocks that the pool evicts; 0: they are lost. Of use where the pool is another memory."""
    fingerprint: bytes = b""
    """The model's fingerprint: block keys begin at `hashing.chain_root(job.salt, fingerprint)`."""


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
            f"weights {_mib(self.weights)}, KV {_mib(self.kv)} ({self.kv_tokens} tokens, {self.concurrency:.1f} "
            f"sequences of {self.max_seq_length}), workspace {_mib(self.workspace)}, free {_mib(self.available)}"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


Progress = Callable[[str, int, int], None]
