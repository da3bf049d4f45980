"""The commands that run a mesh here, or one of its services: serve, demo."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from weft.cli.flags import RedisUrl, fail, run


class ServiceName(StrEnum):
    """A service of the mesh."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    CACHE = "cache"


OneService = Annotated[ServiceName | None, typer.Argument(help="Run this service alone, here.", show_default="all")]
Models = Annotated[
    list[str] | None,
    typer.Option(help="Folder of a checkpoint, or name on the hub; may be repeated.", show_default="MODEL_NAME"),
]
Aliases = Annotated[
    list[str] | None, typer.Option(metavar="ALIAS=NAME", help="Another name for a model; may be repeated.")
]
AdapterFolders = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[MODEL:]NAME=FOLDER",
        help="A low-rank adapter, which requests name MODEL:NAME; may be repeated.",
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Number of workers of each model.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        help="prefill (prompts), decode (answers) or both; may be repeated: the workers of a model take them in turn.",
        show_default="both",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(help="Host to listen at for callers: 0.0.0.0 is open to other machines.", show_default="127.0.0.1"),
]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port to listen at for callers.", show_default="50051")
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port to listen at for HTTP (OpenAI's API); 0 for none.",
        show_default="8000 or a free one",
    ),
]
Gateways = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="Gateway processes that share the ports.",
        show_default="one for every two cores, more from 8 cores on, at most 12",
    ),
]
MaxBatchSize = Annotated[int | None, typer.Option(min=1, help="Most sequences in a worker's batch.")]
MaxSeqLength = Annotated[str | None, typer.Option(help="Most tokens of prompt and answer: 4096, 4k, 32k.")]
Engine = Annotated[
    str | None,
    typer.Option(
        help="gpu, torch (on the CPU), onnxruntime, openvino, tensorrt, exported, compile or paced.",
        show_default="auto",
    ),
]
Quantize = Annotated[str | None, typer.Option(help="Round a plain checkpoint's weights to int8, int4, fp8 or nf4.")]
KvDtype = Annotated[
    str | None, typer.Option(help="Format of stored keys and values: fp8 or int8.", show_default="the model's")
]
KvScales = Annotated[
    str | None, typer.Option(help="Scales of fp8 keys and values: dynamic.", show_default="the checkpoint's, else 1")
]
Speculate = Annotated[
    str | None,
    typer.Option(
        help="Who guesses tokens that a step then checks: ngram, suffix, draft:MODEL, heads:PATH.",
        show_default="nobody",
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Processes of a worker that share each layer.", show_default="1"),
]
PipelineParallel = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Stages of layers, with processes of their own.", show_default="1"),
]
ExpertParallel = Annotated[
    bool,
    typer.Option("--expert-parallel", help="Spread whole experts over the tensor ranks, not the neurons of each."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Write logs to stderr instead of files.")]


def serve(
    part: OneService = None,
    model: Models = None,
    alias: Aliases = None,
    adapter: AdapterFolders = None,
    workers: Workers = 1,
    role: Roles = None,
    redis_url: RedisUrl = "",
    host: Host = None,
    port: Port = None,
    http_port: HttpPort = None,
    gateways: Gateways = None,
    max_batch_size: MaxBatchSize = None,
    max_seq_length: MaxSeqLength = None,
    engine: Engine = None,
    quantize: Quantize = None,
    kv_dtype: KvDtype = None,
    kv_scales: KvScales = None,
    speculate: Speculate = None,
    tensor_parallel: TensorParallel = None,
    pipeline_parallel: PipelineParallel = None,
    expert_parallel: ExpertParallel = False,
    verbose: Verbose = False,
) -> None:
    """Serve one or several models: the whole mesh, or one of its services by name."""
    settings = {
        "MAX_BATCH_SIZE": max_batch_size,
        "MAX_SEQ_LENGTH": _tokens(max_seq_length),
        "ENGINE": _one_of("engine", engine),
        "QUANTIZE": _one_of("quantize", quantize),
        "KV_DTYPE": _one_of("kv_dtype", kv_dtype),
        "KV_SCALES": _one_of("kv_scales", kv_scales),
        "WEFT_SPECULATE": _speculator(speculate),
        "WEFT_TENSOR_PARALLEL": tensor_parallel,
        "WEFT_PIPELINE_PARALLEL": pipeline_parallel,
        "WEFT_EXPERT_PARALLEL": expert_parallel or None,
    }
    environment = {name: str(value) for name, value in settings.items() if value is not None}
    roles = [str(_one_of("role", each)) for each in role or []]
    if part is not None:
        if len(model or []) > 1 or alias:
            fail("several models and aliases are for the whole mesh", usage=True)
        environment |= _worker_settings(adapter or [], roles)
        if workers != 1:
            fail(f"--workers is for the whole mesh: start `weft serve {part}` once for each", usage=True)
        _set_of_gateway(part, "--http-port", "WEFT_GATEWAY_HTTP_PORT", http_port)
        _set_of_gateway(part, "--gateways", "WEFT_GATEWAY_PROCESSES", gateways)
        _run_service(part, environment, model="".join(model or []), redis_url=redis_url, host=host, port=port)
        return
    if len(roles) > workers:
        fail(f"--role: {len(roles)} roles need --workers {len(roles)} or more", usage=True)
    models = [_model_path(each) for each in model or [os.environ.get("MODEL_NAME", "")] if each]
    from report.console import console
    from weft.launch import demo_model, mesh
    from weft.launch.home import default_home
    from weft.launch.plan import HOST, MeshSpec, model_name

    with _mesh_errors():
        models = models or [str(demo_model.model_folder())]
        _refuse_same_names(models)
        spec = MeshSpec(
            models=models,
            home=default_home(),
            aliases=_aliases(alias or [], {model_name(each) for each in models}, set(map(_served_name, models))),
            adapters=_adapters_by_model(adapter or [], [model_name(each) for each in models]),
            workers=workers,
            roles=roles,
            redis_url=redis_url,
            host=host or HOST,
            port=port,
            http_port=http_port,
            gateways=gateways,
            settings=environment,
        )
        run(mesh.serve(spec, console(), verbose=verbose))


def demonstrate(
    prompt: Annotated[str, typer.Option(help="Text to continue.", show_default="the beginning of a story")] = "",
) -> None:
    """Start a mesh with the demo model, stream one answer, print its receipt, stop."""
    from report.console import console
    from weft.cli import demo

    with _mesh_errors():
        run(demo.run(prompt or demo.PROMPT, console()))


def _worker_settings(adapters: list[str], roles: list[str]) -> dict[str, str]:
    """The environment of one worker that serves these adapters in this role. Refuses several roles."""
    settings = {}
    if adapters:
        settings["WEFT_ADAPTERS"] = json.dumps([f"{name}={folder}" for _, name, folder in _adapters(adapters)])
    if len(roles) > 1:
        fail("several roles are for the whole mesh", usage=True)
    if roles:
        settings["WEFT_ROLE"] = roles[0]
    return settings


def _set_of_gateway(part: ServiceName, flag: str, variable: str, value: int | None) -> None:
    """Puts a flag that only a gateway has into its environment. Refuses it for other services."""
    if value is None:
        return
    if part is not ServiceName.GATEWAY:
        fail(f"the {part} has no {flag}", usage=True)
    os.environ[variable] = str(value)


def _run_service(
    part: ServiceName, environment: dict[str, str], *, model: str, redis_url: str, host: str | None, port: int | None
) -> None:
    """Replaces this process by one service, with settings in its environment. Refuses flags that it would ignore."""
    if part is not ServiceName.WORKER and environment:
        fail(f"the {part} has no {', '.join(sorted(environment))}", usage=True)
    for flag, value, owner, name in (
        ("--model", model, ServiceName.WORKER, "MODEL_NAME"),
        ("--redis-url", redis_url, ServiceName.CACHE, "WEFT_REDIS_URL"),
    ):
        if value and part is not owner and value != os.environ.get(name):
            fail(f"the {part} has no {flag}", usage=True)
        if value and part is owner:
            environment[name] = _model_path(value) if name == "MODEL_NAME" else value
    if host is not None or port is not None:
        environment["WEFT_LISTEN"] = _listen(part, host, port)
    os.environ.update(environment)
    # `-m` alone would import from the current folder.
    path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    os.execv(sys.executable, [sys.executable, *path, "-m", f"services.{part}"])


def _listen(part: ServiceName, host: str | None, port: int | None) -> str:
    """host:port of one service, with its own defaults."""
    from services import settings
    from weft.launch.plan import joined

    own_host, _, own_port = str(getattr(settings, f"{part.upper()}_ADDRESS")).rpartition(":")
    return joined(host or own_host, port or int(own_port))


@contextlib.contextmanager
def _mesh_errors() -> Iterator[None]:
    """Ends the command with one line for what can keep a mesh from running."""
    from services.cache.embedded import NoRedisError
    from weft.client.errors import WeftError
    from weft.launch.demo_model import NoDemoModel
    from weft.launch.plan import CannotServe
    from weft.launch.supervisor import GaveUp

    try:
        yield
    except (GaveUp, CannotServe, NoRedisError, NoDemoModel, WeftError) as error:
        fail(str(error))


def _model_path(model: str, flag: str = "--model") -> str:
    """An absolute path for a folder; a name on the hub or of random weights as it is. Refuses a missing folder."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            fail(f"{flag}: {model} is no checkpoint: it has no config.json", usage=True)
        return str(folder.absolute())
    from services.worker.loader import presets

    if model.startswith(presets.PREFIX):
        if model.removeprefix(presets.PREFIX) not in presets.PRESETS:
            known = ", ".join(f"{presets.PREFIX}{name}" for name in presets.PRESETS)
            fail(f"{flag}: {model} is none of {known}", usage=True)
    elif model.count("/") != 1 or model.startswith((".", "/", "~")):
        fail(f"{flag}: there is no folder {model}, and names on the hub have the form OWNER/NAME", usage=True)
    return model


def _refuse_same_names(models: list[str]) -> None:
    """Refuses different models that would be served under one name."""
    by_name: dict[str, str] = {}
    for model in models:
        name = _served_name(model)
        if by_name.setdefault(name, model) != model:
            fail(f"--model: {by_name[name]} and {model} would have one name, {name}", usage=True)


def _served_name(model: str) -> str:
    from weft.launch.plan import model_name

    return os.environ.get("SERVED_MODEL_NAME") or os.environ.get("WEFT_SERVED_NAME") or model_name(model)


def _one_of(setting: str, value: str | None) -> str | None:
    """The value, if the worker's setting of this name allows it. Refuses any other."""
    if value is None:
        return None
    from services.worker.settings import WorkerSettings

    allowed = _literals(WorkerSettings.model_fields[setting].annotation)
    if value not in allowed:
        fail(f"--{setting.replace('_', '-')}: {value!r} is none of {', '.join(allowed)}", usage=True)
    return value


def _speculator(value: str | None) -> str | None:
    """The value, if the worker's setting allows it. Refuses any other."""
    from services.worker.options import SPECULATE, SPECULATORS

    if value is not None and not re.fullmatch(SPECULATE, value):
        fail(f"--speculate: {value!r} is none of {SPECULATORS}", usage=True)
    return value


def _literals(annotation: Any) -> list[str]:
    """The strings that an annotation such as Literal["a", "b"] | None allows."""
    if isinstance(annotation, str):
        return [annotation]
    return [text for part in get_args(annotation) for text in _literals(part)]


def _aliases(pairs: list[str], names: set[str], served: set[str]) -> dict[str, str]:
    """ALIAS=NAME as alias, which must be none of `served`, and name, which must be one of `names`."""
    aliases: dict[str, str] = {}
    for alias, _, name in (pair.partition("=") for pair in pairs):
        if aliases.setdefault(alias, name) != name:
            fail(f"--alias: {alias} is given to {aliases[alias]} and to {name}", usage=True)
    for alias, name in aliases.items():
        if not alias or name not in names:
            known = ", ".join(sorted(names))
            fail(f"--alias: {alias}={name} is not ALIAS=NAME with one of the models {known}", usage=True)
        if alias in served:
            fail(f"--alias: {alias} is the name of a model: an alias of that name has no effect", usage=True)
    return aliases


def _adapters(given: list[str]) -> list[tuple[str, str, str]]:
    """[MODEL:]NAME=FOLDER as model, which may be empty, name and absolute folder."""
    from services.worker.options import ADAPTER_NAME

    found = []
    for each in given:
        names, _, place = each.partition("=")
        model, _, name = names.rpartition(":")
        if not re.fullmatch(ADAPTER_NAME, name) or not place:
            fail(f"--adapter: {each} is not [MODEL:]NAME=FOLDER", usage=True)
        path = Path(place).expanduser().absolute()
        if not (path / "adapter_config.json").is_file():
            fail(f"--adapter: {place} is no adapter: it has no adapter_config.json", usage=True)
        found.append((model, name, str(path)))
    return found


def _adapters_by_model(given: list[str], models: list[str]) -> dict[str, list[str]]:
    """The adapters of each model as NAME=FOLDER."""
    found: dict[str, list[str]] = {}
    for model, name, folder in _adapters(given):
        owner = model or (models[0] if len(models) == 1 else "")
        if owner not in models:
            fail(f"--adapter: {model}:{name} names none of the models {', '.join(sorted(models))}", usage=True)
        found.setdefault(owner, []).append(f"{name}={folder}")
    return found


def _tokens(text: str | None) -> int | None:
    """4096, 4k or 32k as a number of tokens, k being 1024."""
    if text is None:
        return None
    digits, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not digits.isdecimal() or int(digits) == 0:
        fail(f"--max-seq-length: {text!r} is not a number of tokens such as 4096 or 4k", usage=True)
    return int(digits) * factor
