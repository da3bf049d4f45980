"""What the services import, for the process from which `tests.mesh.forked` forks them."""

import gc

from services.process import prepare_grpc

prepare_grpc()  # gRPC reads its settings when it is imported.

import services.cache.main  # noqa: E402
import services.gateway.main  # noqa: E402
import services.scheduler.main  # noqa: E402
import services.worker.build.assemble  # noqa: E402
import services.worker.build.paced  # noqa: E402
import services.worker.main  # noqa: E402, F401

gc.freeze()  # No service visits the imported objects when it collects garbage.
