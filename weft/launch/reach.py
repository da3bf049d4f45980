"""How the process that starts a mesh reaches its ports: as admin at the inner ones, as a client at the gateway's."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpc import aio

from services import rpc
from services.security.door_tls import CERT, name_at, probe
from services.security.identity import NOBODY, Identity, IdentityError, read
from services.security.roles import Role
from weft.launch.admin import admin_identity, has_identity, secret_file


@dataclass(frozen=True, slots=True)
class Reach:
    """The credentials of the process that starts a mesh."""

    identity: Identity = NOBODY
    door: bytes = b""
    """The certificate that the gateway presents, in PEM; empty: the gateway's ports are plain."""

    def channel(self, address: str, peer: Role) -> aio.Channel:
        """A channel to a service of the mesh."""
        if peer != "gateway":
            return rpc.link_channel(address, peer, self.identity)
        if not self.door:
            return rpc.link_channel(address, peer, NOBODY)
        credentials, name = probe(self.door)
        return aio.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", name)])

    def by_name(self, address: str) -> str:
        """host:port of a door as callers on this machine reach it: with a certificate, by a name that this has."""
        host, _, port = address.rpartition(":")
        return f"{name_at(self.door, host)}:{port}" if self.door and address else address


PLAIN = Reach()


def reach(settings: Mapping[str, str], home: Path, plain: bool = False) -> tuple[Reach, dict[str, str]]:
    """How to reach a mesh with these variables beside those of this process, and variables to add for its processes.

    If none names a secret or certificates, the mesh has the secret of its folder, or none if it is `plain`. Invalid
    ones are left to the services, which refuse them with the reason.
    """
    environment = {**os.environ, **settings}
    added = {} if plain or has_identity(environment) else {"WEFT_MESH_SECRET_FILE": str(secret_file(home))}
    try:
        identity = admin_identity({**environment, **added})
        door = read(environment[CERT], CERT) if environment.get(CERT) else b""
    except IdentityError:
        return PLAIN, added
    return Reach(identity, door), added
