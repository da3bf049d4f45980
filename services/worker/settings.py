"""Settings of a worker, read from the environment. Names that users of other servers know (MODEL_NAME, ...) also work.

How to run the model is defined in `EngineOptions`; here is what concerns the process and the mesh.
"""

from typing import Literal

from pydantic import AliasChoices, Field
from pydantic_settings import SettingsConfigDict

from services.settings import SCHEDULER_ADDRESS, WORKER_ADDRESS, CommonSettings
from services.worker.options import EngineOptions, known_as


class WorkerSettings(EngineOptions, CommonSettings):
    """What a worker reads from its environment."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

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
    aliases: list[str] = Field([], description="Other names of the model, as a JSON list.")
    adapters: list[str] = Field(
        [], description="Adapters that are served from the start, as a JSON list of NAME=FOLDER."
    )
    most_adapters: int = Field(
        64,
        ge=0,
        validation_alias=known_as("MAX_CPU_LORAS"),
        description="Most adapters that the worker serves; each has a copy in host memory.",
    )
    cache_address: str = Field("", description="host:port of the cache service; empty: prefixes are not shared.")
    prefix_fetch: bool = Field(
        True,
        description="Fetch prefixes from the cache service and from other workers where that is measured to be the "
        "faster way.",
    )
    device_fetch: bool = Field(
        True,
        description="Copy prefixes directly out of the GPU memory of other workers on this host, where links between "
        "services are authenticated. Otherwise they go through host memory and over gRPC.",
    )
    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="What the worker computes: prompts up to the first token (prefill), answers from the second on "
        "(decode), or both. Where workers of a role are missing, others do its work.",
    )
    settings_shared: bool = Field(
        False,
        description="The settings are those of several models, as `weft serve` sets it for several --model: what only "
        "models that generate have is left out by encoders, and logged. Otherwise encoders refuse it.",
    )
    orphan_s: float = Field(2.0, ge=0, description="Seconds that a job runs on after its gateway's link broke.")
