"""Measures jobs per second that one scheduler process admits over gRPC, and the time until each is assigned.

    python -m bench.links.admission --jobs 20000 --window 64 --blocks 125

Starts a scheduler, attaches one worker that ends every job within 10 ms, and submits with `window` jobs unanswered at a
time. The last column is the scheduler's own processor time: its inverse is what one core admits.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import uvloop

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.hashing import KEY_BYTES

REPORT_S = 0.01


async def start_scheduler() -> tuple[asyncio.subprocess.Process, str]:
    """Start a scheduler on a free port -> its process and address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.scheduler",
        env={**os.environ, "WEFT_LISTEN": "127.0.0.1:0", "WEFT_LOG_FORMAT": "json"},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    ready = json.loads(await process.stderr.readline())
    return process, f"127.0.0.1:{ready['port']}"


def processor_s(pid: int) -> float:
    """Processor time that a process has used so far."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Worker:
    """A worker that reports every job as ended in its next report."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.ended: list[str] = []

    async def attach(self) -> None:
        """Send hello and wait for the answer."""
        card = mesh.ModelCard(name="bench", block_size=16, fingerprint=bytes(32), bundle_digest=bytes(32))
        hello = mesh.WorkerHello(worker_id="worker", address="worker:1", card=card, credits=1 << 20)
        await self._call.write(mesh.AttachRequest(hello=hello))
        await self._call.read()

    async def run(self) -> None:
        """Send reports until cancelled."""
        steps = 0
        while True:
            await asyncio.sleep(REPORT_S)
            steps += 1
            ended, self.ended = self.ended, []
            ends = [mesh.EndedJob(job_id=job_id, attempt=1, tokens=8) for job_id in ended]
            await self._call.write(mesh.AttachRequest(report=mesh.WorkerReport(steps=steps, running=1, ended=ends)))


async def admit(call: Any, worker: Worker, jobs: int, window: int, blocks: int) -> list[float]:
    """Submit jobs -> the seconds until each was assigned, sorted."""
    room = asyncio.Semaphore(window)
    sent_at: dict[str, float] = {}
    waits: list[float] = []

    async def hear() -> None:
        while len(waits) < jobs:
            answer = await call.read()
            if answer.WhichOneof("message") == "assigned":
                job_id = answer.assigned.job_id
                waits.append(time.perf_counter() - sent_at.pop(job_id))
                worker.ended.append(job_id)
                room.release()

    hearing = asyncio.create_task(hear())
    for number in range(jobs):
        await room.acquire()
        submit = mesh.Submit(
            job_id=f"tenant/request-{number}/0",
            attempt=1,
            model="bench",
            prompt_tokens=blocks * 16,
            max_tokens=64,
            block_keys=os.urandom(blocks * KEY_BYTES),
            deadline_s=30,
            tenant="tenant",
            identity=number.to_bytes(32, "big"),
        )
        sent_at[submit.job_id] = time.perf_counter()
        await call.write(mesh.DispatchRequest(submit=submit))
    await hearing
    return sorted(waits)


@dataclass(frozen=True, slots=True)
class Admitted:
    """Figures of one run."""

    per_second: float
    p50_ms: float
    p99_ms: float
    per_core: float
    """Jobs per second of the scheduler's own processor time."""


async def run(jobs: int, window: int, blocks: int) -> Admitted:
    """Start a scheduler and a worker, and submit all jobs once."""
    process, address = await start_scheduler()
    async with rpc.link_channel(address) as gateway_channel, rpc.link_channel(address) as worker_channel:
        worker = Worker(mesh_grpc.SchedulerStub(worker_channel).Attach(wait_for_ready=True))
        await worker.attach()
        reporting = asyncio.create_task(worker.run())
        call: Any = mesh_grpc.SchedulerStub(gateway_channel).Dispatch(wait_for_ready=True)
        await call.write(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id="gateway")))
        began, used = time.perf_counter(), processor_s(process.pid)
        waits = await admit(call, worker, jobs, window, blocks)
        wall_s, used_s = time.perf_counter() - began, processor_s(process.pid) - used
        reporting.cancel()
    process.terminate()
    await process.wait()
    p50, p99 = (waits[int(len(waits) * q)] * 1e3 for q in (0.5, 0.99))
    return Admitted(jobs / wall_s, p50, p99, jobs / used_s)


async def measure(jobs: int, window: int, blocks: int) -> None:
    """Run once and print a row."""
    seen = await run(jobs, window, blocks)
    print(f"{'window':>8}{'jobs/s':>10}{'p50 ms':>10}{'p99 ms':>10}{'cpu us/job':>12}")
    print(f"{window:>8}{seen.per_second:>10.0f}{seen.p50_ms:>10.2f}{seen.p99_ms:>10.2f}{1e6 / seen.per_core:>12.0f}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures how many jobs per second a scheduler admits.")
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs to submit (default 20000)")
    parser.add_argument("--window", type=int, default=64, help="jobs unanswered at a time (default 64)")
    parser.add_argument("--blocks", type=int, default=125, help="prompt blocks of each job (default 125: 2000 tokens)")
    arguments = parser.parse_args()
    uvloop.run(measure(arguments.jobs, arguments.window, arguments.blocks))


if __name__ == "__main__":
    main()
