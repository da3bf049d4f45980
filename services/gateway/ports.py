"""The public ports of a gateway: which doors each one serves, and what guards them. Knows no links and no requests."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from protos.inference_pb2_grpc import add_InferenceServicer_to_server
from protos.kserve_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from services import process, rpc
from services.calls.accept_probe import AcceptProbe
from services.errors import WeftError
from services.gateway.access.authorizer import Authorizer, Credentials
from services.gateway.access.load_gate import LoadGate
from services.gateway.answers.encoding.serve import EncodeService
from services.gateway.answers.serve import AnswerService
from services.gateway.backend import Backend
from services.gateway.doors.grpc_gate import AuthCheck, RefusalGate
from services.gateway.doors.http_routes import HttpRoutes
from services.gateway.doors.http_server import HttpServer, listen
from services.gateway.doors.kserve.door import NAME as KSERVE
from services.gateway.doors.kserve.door import KServeModels, KServeService
from services.gateway.doors.kserve.http_door import KServeHttpDoor
from services.gateway.doors.metrics import MetricsDoor
from services.gateway.doors.native import InferenceService
from services.gateway.doors.openai.door import OpenAIDoor
from services.gateway.doors.openai.embeddings import EmbeddingsDoor
from services.gateway.doors.page import PageDoor
from services.gateway.doors.probes import Probes
from services.gateway.doors.request_stream import StreamLimits
from services.gateway.doors.watch import WatchDoor
from services.gateway.settings import GatewaySettings
from services.security.door_tls import DoorCertificate
from services.security.identity import IdentityError


class Ports:
    """The gRPC port and, unless it is disabled, the HTTP port on the same host."""

    def __init__(
        self, backend: Backend, access: Authorizer, scrape: Callable[[], Awaitable[bytes]], shared: bool
    ) -> None:
        """`scrape` returns the metrics of the whole gateway; `shared`: other processes listen at the same ports. Binds
        the HTTP port. The process ends with one line if the settings are refused."""
        settings = self._settings = backend.settings
        self._backend, self._access, self._shared = backend, access, shared
        self._answers = AnswerService(backend, access)
        self._encoding = EncodeService(self._answers, backend, access)
        self._kserve = KServeModels(self._answers, access, backend.catalog)
        self._certificate = _certificate(settings)
        tls = self._certificate.grpc() if self._certificate else None
        self._public = rpc.PublicDoor(tls, access.requires_keys)
        rpc.check_address(settings.listen, self._public.protected, settings.allow_unprotected)
        self._probe = AcceptProbe()
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the ports are to be closed."""
        early, in_flight = self._answers.early_refusal, lambda: backend.metrics.in_flight
        wait_s = self._probe.wait_s if self._probe.address else None
        self.gate = LoadGate(settings.gateway_most_calls, in_flight, wait_s, lambda: early.refused)
        backend.metrics.load(self.gate.share_now, lambda: self.gate.refused + early.refused)
        self._http = self._http_server(scrape) if settings.gateway_http_port else None
        self.grpc: rpc.Server

    @property
    def http_port(self) -> int:
        """The port of HTTP; 0 if it is disabled."""
        return self._http.port if self._http is not None else 0

    async def open(self) -> None:
        """Begins to listen."""
        self.grpc = await self._serve_grpc()
        await self._probe.open()
        if self._http is not None:
            await self._http.start()

    async def close(self) -> None:
        """Refuses new calls, and gives running ones `drain_s` seconds to end."""
        self._stopping.set_result(None)
        await self._probe.close()  # Else the server would break its connection, which gRPC logs.
        stopping = [self.grpc.stop(self._settings.drain_s)]
        await asyncio.gather(*stopping, *([self._http.stop()] if self._http is not None else []))

    def _refusal(self, credentials: Credentials) -> WeftError | None:
        """Why a call that arrives now is refused before it is read, or None."""
        return self.gate.refusal()

    def _answer_refusal(self, credentials: Credentials) -> WeftError | None:
        """The same for a call that asks for an answer of a model."""
        return self.gate.refusal() or self._answers.early_refusal.refusal(credentials)

    async def _serve_grpc(self) -> rpc.Server:
        settings = self._settings
        calls = StreamLimits(self._refusal, settings.gateway_stall_s, self._stopping)
        native = InferenceService(self._answers, self._encoding, calls)
        kserve = KServeService(self._answers, self._kserve, replace(calls, refusal=self._answer_refusal))
        return await rpc.serve(
            settings.listen,
            [
                rpc.Service("weft.v1.Inference", add_InferenceServicer_to_server, native),
                rpc.Service(KSERVE, add_GRPCInferenceServiceServicer_to_server, kserve),
            ],
            max_message_bytes=rpc.PUBLIC_MESSAGE_BYTES,
            allow_unprotected=settings.allow_unprotected,
            public=self._public,
            counts=self._backend.metrics.all,
            metrics_port=settings.metrics_port,
            mesh_id=settings.mesh_id,
            checks=[AuthCheck(self._access, settings.gateway_open_reflection)],
            shares_port=self._shared,
            gate=RefusalGate(self._refusal, self._answer_refusal, self._probe),
            options=settings.connection_options(),
            own_address=self._probe.address,
        )

    def _http_server(self, scrape: Callable[[], Awaitable[bytes]]) -> HttpServer:
        settings, catalog = self._settings, self._backend.catalog
        routes = HttpRoutes(self._backend.metrics.all, self._refusal, self._answer_refusal)
        OpenAIDoor(self._answers, self._access, catalog).add_to(routes)
        EmbeddingsDoor(self._encoding, self._access).add_to(routes)
        KServeHttpDoor(self._answers, self._access, self._kserve).add_to(routes)
        Probes(catalog).add_to(routes)
        WatchDoor(self._answers).add_to(routes)
        MetricsDoor(self._access, scrape).add_to(routes)
        if settings.gateway_page:
            PageDoor().add_to(routes)
        listener = listen(rpc.host_of(settings.listen), settings.gateway_http_port, self._shared)
        tls = self._certificate.context if self._certificate else None
        most = settings.gateway_most_connections
        return HttpServer(routes.app(), listener, settings.gateway_stall_s, settings.drain_s, most, tls)


def _certificate(settings: GatewaySettings) -> DoorCertificate | None:
    """The certificate of the public ports; None for plain ones. The process ends with one line if it is invalid."""
    if not (settings.gateway_tls_cert or settings.gateway_tls_key):
        return None
    try:
        return DoorCertificate(settings.gateway_tls_cert, settings.gateway_tls_key)
    except IdentityError as error:
        process.refuse_to_serve(str(error))
