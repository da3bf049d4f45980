"""What the services import, for the process from which `tests.mesh.forked` forks them."""

import gc
import weakref

import uvloop  # noqa: F401

from services.process import prepare_grpc

prepare_grpc()  # gRPC reads its settings when it is imported.

import services.cache.main  # noqa: E402
import services.gateway.main  # noqa: E402
import services.scheduler.main  # noqa: E402
import services.worker.build.assemble  # noqa: E402
import services.worker.build.paced  # noqa: E402
import services.worker.main  # noqa: E402, F401

for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    if each.peek()[1].__module__ == "torch.library":
        each.atexit = False  # At its end a process would take 0.1 s to unregister torch's operators one by one.
gc.freeze()  # No service visits the imported objects when it collects garbage.
