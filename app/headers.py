"""Which headers pass through, in either direction."""

from collections.abc import Iterable
from typing import Final

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    b"transfer-encoding upgrade".split()
)
# The client's credentials end here; the others are written anew, speak in our name, or choose a part of the engine.
_NOT_TO_ENGINE: Final = _HOP_BY_HOP.union(
    b"host expect content-length accept-encoding authorization x-api-key cookie forwarded via x-real-ip "
    b"x-request-id x-data-parallel-rank endpoint-load-metrics-format".split()
)
_NOT_TO_ENGINE_PREFIXES: Final = (b"x-vllm-", b"x-tidegate-", b"x-forwarded-")
# Those that this server writes itself, and those that tell of the engine's inside. The engine's own CORS headers would
# open to every web page what `TIDEGATE_CORS_ORIGINS` keeps closed.
# `x-accel-redirect` and `x-sendfile` are orders to a proxy in front.
_NOT_TO_CLIENT: Final = _HOP_BY_HOP.union(
    b"date server via x-powered-by x-request-id endpoint-load-metrics x-accel-redirect x-sendfile".split()
)
_NOT_TO_CLIENT_PREFIXES: Final = (b"x-vllm-", b"x-tidegate-", b"access-control-")


def to_engine(headers: Iterable[tuple[bytes, bytes]], connection: bytes) -> Headers:
    """A request's headers less what ends here; `connection` is the value of that header, which may name more."""
    dropped = _named_too(_NOT_TO_ENGINE, connection)
    return [
        (name, value) for name, value in headers if name not in dropped and not name.startswith(_NOT_TO_ENGINE_PREFIXES)
    ]


def to_client(headers: Iterable[tuple[bytes, bytes]], connection: bytes) -> Headers:
    """An answer's headers less what ends here."""
    dropped = _named_too(_NOT_TO_CLIENT, connection)
    return [
        (name, value) for name, value in headers if name not in dropped and not name.startswith(_NOT_TO_CLIENT_PREFIXES)
    ]


def _named_too(dropped: frozenset[bytes], connection: bytes) -> frozenset[bytes]:
    if connection in (b"", b"keep-alive", b"close"):
        return dropped
    return dropped.union(part.strip().lower() for part in connection.split(b","))
