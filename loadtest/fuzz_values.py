"""What the fuzzer draws: bodies that are nearly JSON, numbers that decide about lanes, paths in disguise, odd heads.

Each family's values are a hypothesis strategy; with the same seed and count it gives the same ones.
"""

import gzip
import json
import zlib
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from app.routes import FORWARDED, OPS, PAGES, Family

JSON_ROUTES: Final = [route for route in FORWARDED if route.method == "POST" and route.family is not Family.AUDIO]
ROUTES: Final = [*FORWARDED, *OPS, *PAGES]
METHODS: Final = "GET POST PUT DELETE PATCH HEAD OPTIONS TRACE CONNECT PROPFIND BREW get".split()


def drawn(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """That many values, fewer where there are no more."""
    seen: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        seen.append(value)

    try:
        collect()
    except Unsatisfiable:
        return seen
    return seen[:count]


def enough(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """Exactly so many, from as many seeds as that takes."""
    seen: list[Any] = []
    while len(seen) < count:
        seen += drawn(strategy, count - len(seen), number + len(seen))
    return seen


# --- decoding: bodies that are nearly JSON, or JSON in a way of its own ----------------------------------------------

SCALARS: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, -(10**30)]),
    st.floats(),
    st.text(max_size=30),
    st.sampled_from(["\ud800", "\0", "\u2028", "é" * 50, "a" * 3000, "data: [DONE]\n\n", "${x}", "../../etc"]),
)
VALUES: st.SearchStrategy[Any] = st.deferred(
    lambda: SCALARS | st.lists(VALUES, max_size=4) | st.dictionaries(st.text(max_size=10), VALUES, max_size=4)
)
CODINGS: Final = "utf-8 utf-8-sig utf-16 utf-16-le utf-32 utf-32-be latin-1".split()
TYPES: Final = [b"application/json", b"application/json; charset=utf-16", b"text/plain", b"", b"multipart/form-data"]
NESTS: Final = st.builds(
    lambda opening, depth, end: opening * depth + end,
    st.sampled_from([b"[", b'{"a":', b"[[],", b'{"messages":[{"content":']),
    st.integers(1, 20_000),
    st.sampled_from([b"", b"]" * 100, b"1", b"\xff"]),
)


def _encode(value: Any, coding: str, ascii_only: bool) -> bytes:
    return json.dumps(value, ensure_ascii=ascii_only).encode(coding, "surrogatepass" if "utf" in coding else "replace")


def _damage(body: bytes, at: int, how: int) -> bytes:
    at %= len(body) + 1
    damaged = (body[:at], body[at:], body[:at] + b"\xff" + body[at:], body[:at] + body[at + 1 :], body * 2, body + b"x")
    return damaged[how % len(damaged)]


JSONS: Final = st.builds(_encode, VALUES, st.sampled_from(CODINGS), st.booleans())
BODIES: Final = st.one_of(
    st.binary(max_size=200),
    JSONS,
    st.builds(_damage, JSONS, st.integers(0, 1000), st.integers(0, 5)),
    NESTS,
    JSONS.map(lambda body: gzip.compress(body, mtime=0)),
    JSONS.map(zlib.compress),
)
DECODING: Final = st.tuples(st.sampled_from(JSON_ROUTES), BODIES, st.sampled_from(TYPES))

# --- lanes: valid requests whose numbers and shapes decide about cost, weight and lane -------------------------------

NUMBERS: Final = st.one_of(st.integers(-5, 5000), st.integers(), st.floats(), SCALARS)
FIELDS: Final = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys("n max_tokens max_completion_tokens max_output_tokens best_of priority".split(), NUMBERS),
        **dict.fromkeys("prompt input messages tools system instructions response_format query".split(), VALUES),
        "stream": st.booleans() | SCALARS,
        "background": st.booleans() | SCALARS,
        "fake": st.fixed_dictionaries({}, optional={"events": st.integers(0, 30)}),
    },
)
LIMITS: Final = st.lists(
    st.tuples(
        st.sampled_from([b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms", b"x-slo-ttft-ms"]),
        st.sampled_from([b"1", b"50", b"5000", b"0", b"-1", b"1e9", b"9" * 400, b"nan", b"", b"1,2", b"0.5", b"5000"]),
    ),
    max_size=1,
)
LANES: Final = st.tuples(st.sampled_from(JSON_ROUTES), FIELDS, LIMITS)

# --- targets: known paths in disguise, and other methods ------------------------------------------------------------


def _disguise(path: str, at: int, how: int, text: str) -> str:
    at %= len(path)
    return (
        path,
        f"{path[:at]}%{ord(path[at]):02x}{path[at + 1 :]}",
        path[:at] + "/" + path[at:],
        path[:at] + path[at:].upper(),
        f"/{text}/..{path}",
        f"/.{path}",
        f"{path}/",
        f"{path}?{text}",
        f"{path}#{text}",
        f"{path};{text}",
        f"{path}%00{text}",
        f"{path}%2f..%2f{text}",
        path.replace("/", "%2F"),
        path.replace("/", "\\"),
        f"http://{text or 'h'}{path}",
        f"http://{text}@h:99999{path}",
        f"//{text}{path}",
        f"/{text}",
        "*",
        text or "/",
        path + "\xff",
    )[how]


PATHS: Final = st.builds(
    _disguise,
    st.sampled_from([route.name for route in ROUTES] + ["/docs", "/v1/load_lora_adapter", "/fake/counts", "/sleep"]),
    st.integers(0, 100),
    st.integers(0, 20),
    st.text(st.characters(codec="latin-1", exclude_characters=" \r\n\t\0"), max_size=12),
)
TARGETS: Final = st.tuples(st.sampled_from(METHODS + ["POST", "GET"] * 4), PATHS)

# --- wishes: valid requests that would rather speak another protocol, as some clients' all do -------------------------

WISHES: Final = st.tuples(
    st.sampled_from(JSON_ROUTES), st.sampled_from([b"h2c", b"websocket", b"TLS/1.2, h2c", b"x"]), st.booleans()
)

# --- heads: framing that two parsers could read in two ways ----------------------------------------------------------

SMUGGLED: Final = b"POST /v1/completions HTTP/1.1\r\nhost: smuggled\r\ncontent-length: 2\r\n\r\n{}"
NAMES: Final = st.sampled_from(
    b"content-length,transfer-encoding,Transfer-Encoding,content-length ,\tcontent-length,transfer_encoding,connection,"
    b"upgrade,expect,te,trailer,host,x-forwarded-for,forwarded,via,x-real-ip,x-vllm-priority,x-tidegate-reason,"
    b"x-data-parallel-rank,authorization,x-api-key,cookie,keep-alive,x-rand,proxy-authorization,origin,content-encoding,"
    b"http2-settings,sec-websocket-key".split(b",")
)
WORTHS: Final = st.one_of(
    st.sampled_from(
        b"0|2|5|+2|-1|2,2|2, 5|0x2|1e1| 2|2 |99999999999999999999|chunked|Chunked|identity|chunked, identity|"
        b"identity, chunked|xchunked|\x0bchunked|chunked;q=1|close|keep-alive|upgrade|close, x-api-key|websocket|h2c|"
        b"100-continue|trailers|\r\n folded|2\r\n 5|gzip|http://evil.example".split(b"|")
    ),
    st.binary(max_size=20),
)
FRAMES: Final = [
    b"",
    b"{}",
    b"0\r\n\r\n",
    b"2\r\n{}\r\n0\r\n\r\n",
    b"2;ext=1\r\n{}\r\n0\r\ntrailer: 1\r\n\r\n",
    b"0x2\r\n{}\r\n0\r\n\r\n",
    b"2\n{}\n0\n\n",
    b"-1\r\n",
    b"fffffffffffffffff\r\n{}",
    b"0\r\n\r\n" + SMUGGLED,
    b"{}" + SMUGGLED,
    SMUGGLED,
]
HEADS: Final = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["POST"] * 5 + METHODS),
        "target": st.sampled_from([b"/v1/completions", b"/v1/models", b"/livez", b"/tokenize"]),
        "version": st.sampled_from([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 ", b"ICY"]),
        "headers": st.lists(st.tuples(NAMES, WORTHS), max_size=4),
        "separator": st.sampled_from([b": "] * 6 + [b":", b" : ", b":\t", b""]),
        "end": st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r", b"\r\r\n", b"\n\r"]),
        "frame": st.sampled_from(FRAMES),
    }
)
