"""The worker's door: the Run link of each gateway, and the tokenizer bundle by digest. Knows jobs, not engines."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog
from grpc import StatusCode, aio

from protos import mesh_pb2 as mesh
from services.errors import WeftError, invalid
from services.worker.jobs import Jobs, Link

log = structlog.get_logger("worker.service")

BUNDLE_PIECE_BYTES = 1 << 20


class WorkerService:
    """weft.v1.Worker."""

    def __init__(self, jobs: Jobs, bundle: bytes, digest: bytes) -> None:
        self._jobs = jobs
        self._bundle = bundle
        self._digest = digest

    async def Run(
        self, requests: AsyncIterator[mesh.RunRequest], context: aio.ServicerContext[mesh.RunRequest, mesh.RunResponse]
    ) -> None:
        """A gateway's link: jobs come in, tokens go out, one message per engine step."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("message", "the first message is hello")
        link = Link(first.hello.gateway_id)
        log.info("gateway linked", gateway=link.gateway_id)
        reader = asyncio.create_task(self._read(link, requests))
        try:
            async for response in link.outbox:
                await context.write(response)
            await reader
        finally:
            reader.cancel()
            self._jobs.leave(link)
            log.info("gateway gone", gateway=link.gateway_id)

    async def _read(self, link: Link, requests: AsyncIterator[mesh.RunRequest]) -> None:
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "job":
                        self._jobs.start(link, request.job)
                    case "attach":
                        self._jobs.attach(link, request.attach)
                    case "cancel":
                        self._jobs.cancel(link, request.cancel)
                    case _:
                        raise invalid("message", "not a message of this link")
        finally:
            link.outbox.close()

    async def FetchBundle(self, request: mesh.FetchBundleRequest, context: Any) -> AsyncIterator[mesh.FetchBundleResponse]:
        """The bundle in pieces. NOT_FOUND if the digest is another model's."""
        if request.digest != self._digest:
            raise WeftError(StatusCode.NOT_FOUND, "BUNDLE_NOT_FOUND", "this worker has another bundle")
        for start in range(0, len(self._bundle), BUNDLE_PIECE_BYTES):
            yield mesh.FetchBundleResponse(data=self._bundle[start : start + BUNDLE_PIECE_BYTES])
