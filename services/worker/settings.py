"""Settings of a worker. Names that users of other servers know (MODEL_NAME, MAX_BATCH_SIZE, ...) work as they are."""

from typing import Literal

from pydantic import AliasChoices, Field

from services.settings import SCHEDULER_ADDRESS, WORKER_ADDRESS, CommonSettings


def _known_as(name: str) -> AliasChoices:
    return AliasChoices(name, f"WEFT_{name}", name.lower())


class WorkerSettings(CommonSettings):
    """What a worker reads from its environment."""

    listen: str = Field(WORKER_ADDRESS, description="host:port to listen at; port 0 takes a free one.")
    advertise: str = Field("", description="host:port at which gateways reach this worker; empty: where it listens.")
    scheduler_address: str = Field(SCHEDULER_ADDRESS, description="host:port of the scheduler.")
    model: str = Field(
        "",
        validation_alias=AliasChoices("MODEL_NAME", "WEFT_MODEL", "model"),
        description="Folder of a Hugging Face checkpoint, or its name on the hub.",
    )
    served_name: str = Field(
        "",
        validation_alias=AliasChoices("SERVED_MODEL_NAME", "WEFT_SERVED_NAME", "served_name"),
        description="Name that requests use; empty: the last part of the model's.",
    )
    aliases: list[str] = Field([], description="Other names for it, as a JSON list.")
    engine: Literal["auto", "gpu", "torch", "paced"] = Field(
        "auto",
        validation_alias=_known_as("ENGINE"),
        description="What computes: gpu, or plain torch on the CPU; auto takes the GPU if there is one. paced only "
        "pretends, at a set pace.",
    )
    max_batch_size: int = Field(
        64,
        ge=1,
        le=4096,
        validation_alias=_known_as("MAX_BATCH_SIZE"),
        description="Most sequences in the batch; on a GPU 256 unless set.",
    )
    max_seq_length: int | None = Field(
        None,
        ge=2,
        validation_alias=_known_as("MAX_SEQ_LENGTH"),
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
        description="Beside many running answers, prompt tokens of a step when one prompt is in line (n prompts: n * n "
        "times as many); on a GPU 200 unless set. Less keeps answers even, more computes prompts sooner.",
    )
    prefix_cache: bool = Field(True, description="Keep computed prefixes for later requests.")
    cache_address: str = Field("", description="host:port of the cache service; empty: prefixes are not shared.")
    prefix_fetch: bool = Field(
        True,
        description="Share prefixes through the cache service where that is measured to be the faster way.",
    )
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
        validation_alias=_known_as("QUANTIZE"),
        description="Round the weights of a plain checkpoint as they come in; absent: serve them as they are.",
    )
    kv_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        validation_alias=_known_as("KV_DTYPE"),
        description="Of stored keys and values; auto is what the checkpoint was calibrated for, or dtype. fp8 holds "
        "twice the tokens of bfloat16, int8 nearly so (a scale for each token and head).",
    )
    kv_scales: Literal["checkpoint", "dynamic"] = Field(
        "checkpoint",
        validation_alias=_known_as("KV_SCALES"),
        description="Of keys and values in fp8, by head: what the checkpoint says, else 1; dynamic measures them at "
        "the start, by a prompt of 256 random tokens, unless the checkpoint brings any.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; absent: torch's choice.")
    orphan_s: float = Field(2.0, ge=0, description="Seconds that a job runs on after its gateway's link broke.")
    paced_step_ms: float = Field(10.0, ge=0, description="Milliseconds of a step of the paced engine.")
    paced_prefill_rate: float = Field(
        0.0, ge=0, description="Prompt tokens that the paced engine computes in a second; 0: any number."
    )
