"""The models that are served, their names, and their tokenizers by digest. Knows workers as addresses only."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Executor

import structlog
from grpc import StatusCode, aio

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import WorkerStub
from services import rpc, telemetry
from services.errors import WeftError, invalid, unavailable
from services.gateway.access.errors import denied
from services.gateway.access.tenants import Tenant
from services.gateway.links import adapters
from services.gateway.links.adapters import Served
from services.gateway.text.encoder import Encoder
from services.gateway.text.tokenizer import ChatSpecialTokens, TextModel
from services.gateway.text.tool_calls.formats import FormatName
from services.gateway.text.turns import no_tokenizer
from services.validate_encode import tasks_of

log = structlog.get_logger("models")

_MAX_BUNDLES = 32
"""Tokenizers in memory; the least recently used goes first."""
_FETCH_S = 30.0
_MAX_QUOTED = 64


class Catalog:
    """The models of the mesh as last reported by the scheduler, and all that were served before: a model without
    workers is unavailable, not unknown. A tenant sees the models that it may use."""

    def __init__(
        self,
        threads: Executor,
        chat_special_tokens: ChatSpecialTokens = "escape",
        tool_format: FormatName = "auto",
        encoder: Encoder | None = None,
    ) -> None:
        """`threads` build the tokenizers; `encoder` is prepared for each."""
        self._encoder = encoder
        self._warming: set[asyncio.Task[None]] = set()
        self._threads = threads
        self._tool_format = tool_format
        self._chat_special_tokens = chat_special_tokens
        self._served: dict[str, Served] = {}
        self._names: dict[str, Served] = {}
        self._adapters: dict[str, Served] = {}
        """Models with adapters, by MODEL:ADAPTER."""
        self._loading: list[mesh.WorkerLoading] = []
        self._texts: OrderedDict[bytes, asyncio.Task[TextModel]] = OrderedDict()

    def update(self, models: mesh.ModelList) -> None:
        """Takes the scheduler's list, and begins to fetch the tokenizers of new models."""
        self._served = {model.card.name: Served(model.card, tuple(model.addresses)) for model in models.models}
        self._loading = list(models.loading)
        # The names of a listed model are those of its card now: another one may have lost aliases of the last.
        self._names = {name: each for name, each in self._names.items() if each.card.name not in self._served}
        # A name takes precedence over an alias; the first of two models with one alias has it, as in the scheduler.
        for served in reversed(self._served.values()):
            self._names.update(dict.fromkeys(served.card.aliases, served))
        for served in self._served.values():
            self._names[served.card.name] = served
            if served.addresses:
                self._load(served)
        self._adapters = adapters.served_with_adapters(models, self._adapters)

    @property
    def addresses(self) -> set[str]:
        """The addresses of all workers."""
        return {address for served in self._served.values() for address in served.addresses}

    @property
    def available(self) -> bool:
        """At least one model has a worker."""
        return any(served.addresses for served in self._served.values())

    @property
    def loading(self) -> list[api.Loading]:
        """The phase of every worker that is loading a model."""
        return [_progress(each) for each in self._loading]

    def find(self, name: str, tenant: Tenant) -> Served:
        """The model with this name or alias; without a name, the only one that the tenant may use. Raises WeftError."""
        if not name:
            return self._only(tenant)
        served = self._names.get(name) or self._adapters.get(name)
        if served is not None and not _permits(tenant, served):
            raise denied("this key does not permit this model", "MODEL_DENIED", "model")
        if served is not None and (served.addresses or not self._is_loading(name)):
            return served
        if self._is_loading(name):
            raise unavailable("MODEL_LOADING", "the model is being loaded")
        raise WeftError(StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", self._not_found(name, tenant), field="model")

    def generating(self, tenant: Tenant) -> Iterator[str]:
        """The models that generate and that the tenant may use, by the scheduler's names."""
        for served in self._served.values():
            if "generate" in tasks_of(served.card) and _permits(tenant, served):
                yield served.model

    def _not_found(self, name: str, tenant: Tenant) -> str:
        """The message for an unknown name, with the names of the models that the tenant may use."""
        asked = name if len(name) <= _MAX_QUOTED else f"{name[:_MAX_QUOTED]}..."
        known = ", ".join(sorted(name for name, served in self._listed().items() if _permits(tenant, served)))
        return f"no model {asked!r}: {f'there are {known}' if known else 'none is served'}"

    def _only(self, tenant: Tenant) -> Served:
        models = self._served or {served.card.name: served for served in self._names.values()}
        mine = [served for served in models.values() if _permits(tenant, served)]
        if not mine:
            raise unavailable("NO_WORKER", "no model is served yet")
        if len(mine) > 1:
            raise invalid("model", "required, because several models are served", "MODEL_REQUIRED")
        return mine[0]

    def _is_loading(self, name: str) -> bool:
        return any(name in (each.model, *each.aliases) for each in self._loading)

    async def text(self, served: Served) -> TextModel:
        """The tokenizer and template of a model. Raises WeftError."""
        task = self._load(served)
        # Shielded: a client that leaves must not cancel a fetch that others wait for.
        return task.result() if task.done() else await asyncio.shield(task)

    async def listing(self, tenant: Tenant) -> list[api.Model]:
        """The models that are served or being loaded, sorted by name."""
        served = self._listed()
        models = {name: await self._describe(each) for name, each in served.items() if _permits(tenant, each)}
        for each in self._loading:
            if each.model in models or tenant.may_use((each.model, *each.aliases)):
                model = models.setdefault(each.model, api.Model(name=each.model))
                model.loading.append(_progress(each))
        return [model for _, model in sorted(models.items())]

    async def close(self) -> None:
        """Cancels the fetches that are under way."""
        tasks = [*self._texts.values(), *self._warming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _listed(self) -> dict[str, Served]:
        """The models that the scheduler lists, and their adapters."""
        adapted = {each.card.name: each for each in self._adapters.values() if each.base in self._served}
        return self._served | adapted

    async def _describe(self, served: Served) -> api.Model:
        card = served.card
        try:
            chat = (await self.text(served)).chat
        except WeftError:
            chat = False  # Requests to this model receive the error.
        return api.Model(
            name=card.name,
            context_length=card.context_length,
            vocab_size=card.vocab_size,
            parameters=card.parameters,
            architecture=card.architecture,
            workers=len(served.addresses),
            chat=chat,
            aliases=card.aliases,
            base=served.base,
            engine=card.engine,
            tasks=tasks_of(card),
            dimensions=card.encoder.width if "embed" in card.encoder.tasks else 0,
            prompts=sorted(card.encoder.prompts),
            labels=card.encoder.labels if "classify" in card.encoder.tasks else (),
        )

    def _load(self, served: Served) -> asyncio.Task[TextModel]:
        digest = served.card.bundle_digest
        task = self._texts.get(digest)
        if task is not None and not (task.done() and _failed(task)):
            self._texts.move_to_end(digest)
            return task
        task = self._texts[digest] = asyncio.create_task(self._fetch(served))
        task.add_done_callback(_failed)  # Marks the exception as retrieved; the next request fetches again.
        self._texts.move_to_end(digest)
        if len(self._texts) > _MAX_BUNDLES:
            _, oldest = self._texts.popitem(last=False)
            if self._encoder is not None and oldest.done() and not _failed(oldest):
                self._encoder.forget(oldest.result())
        return task

    async def _fetch(self, served: Served) -> TextModel:
        """Loads a bundle from the first worker that sends it intact. Raises WeftError."""
        for address in served.addresses:
            try:
                data = await _download(address, served.card.bundle_digest)
            except aio.AioRpcError as error:
                log.warning("bundle not fetched", model=served.card.name, code=error.code().name)
                continue
            if hashlib.sha256(data).digest() != served.card.bundle_digest:
                log.warning("bundle does not match its digest", model=served.card.name)
                continue
            try:
                text = await asyncio.get_running_loop().run_in_executor(self._threads, self._build, data)
            except Exception as error:
                telemetry.log_exception("bundle cannot be used", error)
                break
            self._warm_up(text)
            return text
        raise no_tokenizer()

    def _warm_up(self, text: TextModel) -> None:
        if self._encoder is not None:
            task = asyncio.create_task(self._encoder.warm_up(text))
            self._warming.add(task)
            task.add_done_callback(self._warming.discard)

    def _build(self, data: bytes) -> TextModel:
        return TextModel(mesh.Bundle.FromString(data), self._chat_special_tokens, self._tool_format)


def _progress(each: mesh.WorkerLoading) -> api.Loading:
    percent = min(100, 100 * each.done // each.total) if each.total else 0
    return api.Loading(phase=each.phase, percent=percent)


def _permits(tenant: Tenant, served: Served) -> bool:
    return tenant.may_use((served.card.name, *served.card.aliases))


def _failed(task: asyncio.Task[TextModel]) -> bool:
    return task.cancelled() or task.exception() is not None


async def _download(address: str, digest: bytes) -> bytes:
    data = bytearray()
    async with rpc.link_channel(address, "worker") as channel:
        call = WorkerStub(channel).FetchBundle(mesh.FetchBundleRequest(digest=digest), timeout=_FETCH_S)
        async for piece in call:
            data += piece.data
    return bytes(data)
