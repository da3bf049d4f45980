"""The identity of a person's tools, such as `weft bench --profile`, at the inner ports of a mesh."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from services.process import refuse_to_serve
from services.security import identity as identities
from services.security.identity import Identity, IdentityError
from weft.launch.home import default_home

SECRET_FILE = "mesh-secret"


def has_identity(environment: Mapping[str, str]) -> bool:
    """The environment names a mesh secret or certificates."""
    return any(environment.get(name) for name in identities.VARIABLES)


def secret_file(home: Path) -> Path:
    """The file with the secret of the mesh in this folder, which is made if need be. Only its owner may read it."""
    path = home / SECRET_FILE
    if not path.exists():
        written = path.with_suffix(".new")  # A full disk must not leave an empty secret.
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        written.replace(path)
    return path


def admin_identity(environment: Mapping[str, str]) -> Identity:
    """The role admin in the mesh that these variables describe. Raises IdentityError."""
    return identities.load("admin", identities.named(environment))


def assume_admin() -> None:
    """Makes this process a tool of the mesh that the environment describes, or else of the one in the home folder.

    Ends the process with one line on stderr if the variables are wrong.
    """
    environment = dict(os.environ)
    path = default_home() / SECRET_FILE
    if not has_identity(environment) and path.exists():
        environment["WEFT_MESH_SECRET_FILE"] = str(path)
    try:
        identities.assume(admin_identity(environment))
    except IdentityError as error:
        refuse_to_serve(str(error))
