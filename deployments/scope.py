"""With whom a request may share what is computed of its prompt."""

from __future__ import annotations

import hashlib

from specdec.params import CacheScope


def tenant_of(credentials: str) -> bytes:
    """A digest of the ``Authorization`` that a request comes with; empty where it has none."""
    return hashlib.sha256(credentials.encode()).digest() if credentials else b""


def cache_scope(tenant: bytes, cache_salt: str | None, shared_tokens: int = 0) -> CacheScope:
    """The scope of a prompt.

    Args:
        tenant: of the request.
        cache_salt: as the request gives it: it shares with requests of the same salt only, its
            system prompt included.
        shared_tokens: of the system prompt, which all tenants share otherwise.
    """
    if cache_salt is not None:
        salt = cache_salt.encode("utf-8", "surrogatepass")
        return CacheScope(0, hashlib.sha256(tenant.ljust(32, b"\0") + salt).digest())
    return CacheScope(shared_tokens, tenant)
