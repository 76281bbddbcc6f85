"""Headers that end at the gateway, and those that must get through."""

import pytest

from app.headers import Headers, to_client, to_engine

HOP_BY_HOP = (
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    b"transfer-encoding upgrade".split()
)
CREDENTIALS = b"authorization x-api-key cookie".split()
OURS = b"x-vllm-priority x-vllm-anything x-tidegate-reason x-forwarded-for x-forwarded-proto forwarded via".split()

OTHERS = b"host expect accept-encoding content-length x-request-id x-data-parallel-rank x-real-ip".split()
OTHERS += [b"endpoint-load-metrics-format"]  # asks vLLM to tell its load in a header of the answer
INSIDE = (
    b"date server via x-powered-by x-request-id x-vllm-anything x-tidegate-reason access-control-allow-origin "
    b"access-control-allow-credentials endpoint-load-metrics x-accel-redirect x-sendfile".split()
)


def pairs(*names: bytes) -> Headers:
    return [(name, b"v") for name in names]


@pytest.mark.parametrize(
    "name",
    [*HOP_BY_HOP, *CREDENTIALS, *OURS, *OTHERS],
)
def test_does_not_reach_the_engine(name: bytes) -> None:
    assert to_engine(pairs(b"a", name, b"b"), b"") == pairs(b"a", b"b")


@pytest.mark.parametrize("name", [*HOP_BY_HOP, *INSIDE])
def test_does_not_reach_the_client(name: bytes) -> None:
    assert to_client(pairs(b"a", name, b"b"), b"") == pairs(b"a", b"b")


@pytest.mark.parametrize(
    "name", b"accept content-type user-agent traceparent anthropic-version openai-organization x-slo-ttft-ms".split()
)
def test_reaches_the_engine(name: bytes) -> None:
    assert to_engine(pairs(name), b"keep-alive") == pairs(name)


@pytest.mark.parametrize(
    "name", b"content-type content-length content-encoding cache-control x-ratelimit-limit set-cookie".split()
)
def test_reaches_the_client(name: bytes) -> None:
    assert to_client(pairs(name), b"keep-alive") == pairs(name)


@pytest.mark.parametrize("passes", [to_engine, to_client])
@pytest.mark.parametrize("connection", [b"x-hop", b"close, X-Hop", b"keep-alive , x-hop,", b",x-hop"])
def test_what_the_connection_header_names_ends_here_too(passes: object, connection: bytes) -> None:
    assert callable(passes)
    assert passes(pairs(b"connection", b"x-hop", b"x-end"), connection) == pairs(b"x-end")


@pytest.mark.parametrize("passes", [to_engine, to_client])
def test_repeated_headers_keep_their_number_and_order(passes: object) -> None:
    assert callable(passes)
    assert passes([(b"a", b"1"), (b"b", b""), (b"a", b"2")], b"") == [(b"a", b"1"), (b"b", b""), (b"a", b"2")]
