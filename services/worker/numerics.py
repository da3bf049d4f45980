"""All that the bits of a token depend on beside the checkpoint, as one value. Knows names of formats, never tensors."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a model's numbers are computed and stored.

    Models of equal checkpoints and equal `fingerprint_parts` may continue one another's answers and share results.
    Blocks of equal `block_layout` may be exchanged. An adapter belongs to a job, not to the worker:
    `hashing.adapted` adds it to the fingerprint.
    """

    dtype: str
    """The dtype of weights and activations: float32, bfloat16 or float16."""
    device: str
    """The kind of device: cpu, gpu or paced. Kinds of devices add up in different orders."""
    threads: int
    """CPU threads of a deterministic engine on a CPU, which share out long sums. 0: bits are not promised, or the
    device is no CPU."""
    deterministic: bool
    """Logits do not depend on the batch, on chunking or on prefix hits."""
    weights: str = ""
    """The format that the weights of linear layers are rounded to at the start; empty: as in the checkpoint."""
    kv_dtype: str = "auto"
    """The format of stored keys and values as it was asked for; auto: that of the checkpoint."""
    kv_scales: str = "checkpoint"
    """Where the scales of keys and values come from: checkpoint, or dynamic (measured at the start)."""
    fetch_dtype: str = "auto"
    """The format of keys and values on the way from worker to worker; auto: that of stored ones."""
    stored: str = ""
    """The format of stored keys and values, once the checkpoint is read."""
    scales_digest: str = ""
    """The digest of measured scales, once they are measured: they may differ between machines."""
    shard: str = "0of1"
    """Which part of the model this worker has; or by how many ranks it has the layers computed, which add up partial
    sums, and whether they have whole experts."""

    def fingerprint_parts(self) -> list[str]:
        """What enters the model's fingerprint, known before the checkpoint is read."""
        parts = [self.dtype, str(self.deterministic)]
        # Equal fingerprints promise equal bits where the mode does, and devices add up in different orders.
        if self.device == "paced" or (self.device == "gpu" and self.deterministic):
            parts.append(self.device)
        parts += [self.shard] if self.deterministic and self.shard != "0of1" else []
        parts += [self.weights] if self.weights else []
        parts += [self.kv_dtype] if self.kv_dtype != "auto" else []
        parts += [self.kv_scales] if self.kv_scales != "checkpoint" else []
        # Rounded blocks have the keys of computed ones, which begin with the fingerprint: only workers that accept
        # rounded blocks find them.
        parts += [f"fetched in {self.fetch_dtype}"] if self.fetch_dtype != "auto" else []
        return parts

    def loaded(self, stored: str, scales_digest: str) -> "Numerics":
        """The same, with what is known once the model is loaded."""
        return replace(self, stored=stored, scales_digest=scales_digest)

    def block_layout(self, block_size: int, layers: int, kv_heads: int, head_dim: int) -> str:
        """The layout of blocks' contents, as a name that the cache service compares."""
        dtype = self.dtype if self.stored in ("", self.dtype) else f"{self.dtype}+{self.stored}"
        parts = [dtype, str(block_size), f"{layers}x{kv_heads}x{head_dim}", self.shard]
        if self.deterministic:
            parts.append("gpu" if self.device == "gpu" else str(self.threads))
        parts += [self.weights] if self.weights else []
        parts += [self.scales_digest] if self.scales_digest else []
        return "/".join(parts)
