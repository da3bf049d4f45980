"""Writes tenants of a tenants file. Knows no limits."""

import hashlib

KEY = "wk-secret"
"""The key of the first tenant of most tests."""


def tenant(name: str, key: str = KEY, *settings: str) -> str:
    """A tenant with this key, as TOML; each setting is a line, such as "concurrent = 1"."""
    hashed = hashlib.sha256(key.encode()).hexdigest()
    return "\n".join(["[[tenant]]", f'name = "{name}"', f'keys = ["sha256:{hashed}"]', *settings, ""])
