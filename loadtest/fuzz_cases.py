"""What the fuzzer sends: requests drawn from the OpenAPI document and from what goes wrong in bodies, paths and heads.

Each family is a hypothesis strategy; with the same seed and count it gives the same cases.
"""

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import requests
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from app.routes import FORWARDED, OPS, PAGES, Family, Route
from tests.harness import body_for

DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "openapi.yaml"
KEY: Final = "fuzz-key-that-nothing-may-tell"
ID: Final = b"x-request-id"
WITHOUT_KEY: Final = 8  # one request of so many
SHARES: Final = {"schema": 0.4, "decoding": 0.2, "lanes": 0.15, "targets": 0.15, "wishes": 0.01, "heads": 0.09}
JSON_ROUTES: Final = [route for route in FORWARDED if route.method == "POST" and route.family is not Family.AUDIO]
ROUTES: Final = [*FORWARDED, *OPS, *PAGES]
METHODS: Final = "GET POST PUT DELETE PATCH HEAD OPTIONS TRACE CONNECT PROPFIND BREW get".split()
Pairs = list[tuple[bytes, bytes]]
Ids = Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Case:
    """One connection's worth of bytes. `id` is its request's; `framed`: one well-formed request, which gets an end."""

    family: str
    id: bytes
    data: bytes
    body: bytes | None = None  # where it must reach the engine as it is
    framed: bool = True
    head_only: bool = False  # no more of the answer is read: one to HEAD has no body, one to a watcher has no end
    served: bool = False  # nothing is wrong with it: the answer must be the engine's


def cases(count: int, number: int) -> Iterator[Case]:
    """So many cases of all families, drawn from the seed `number`, in an order that mixes nothing."""
    ids = (b"case-%d" % index for index in itertools.count())
    made = 0
    for place, (family, share) in enumerate(SHARES.items()):
        wanted = count - made if place == len(SHARES) - 1 else round(count * share)
        for case in FAMILIES[family](wanted, number, ids):
            yield case
            made += 1


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


def request(method: str, target: bytes, headers: Pairs, body: bytes, case_id: bytes, *, chunked: bool = False) -> bytes:
    """A whole request that closes its connection; headers as given, then those that frame it."""
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: fuzz", b"connection: close", ID + b": " + case_id]
    lines += [name + b": " + value for name, value in headers]
    if chunked:
        pieces = (body[start : start + 1000] for start in range(0, len(body), 1000))
        framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        return b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", framed])
    if body or method == "POST":
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def with_key(place: int) -> Pairs:
    """The right key, in either header; none, now and then."""
    if place % WITHOUT_KEY == 0:
        return [(b"x-api-key", b"wrong")] if place % 3 else []
    value = KEY.encode()
    return [(b"authorization", b"Bearer " + value)] if place % 2 else [(b"x-api-key", value)]


# --- schema: what schemathesis makes of the document, as it should be and as it should not --------------------------


def _schema(count: int, number: int, ids: Ids) -> Iterator[Case]:
    schema = schemathesis.openapi.from_dict(yaml.safe_load(DOCUMENT.read_text()))
    operations = [result.ok() for result in schema.get_all_operations()]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    rich = [(one, mode) for one in operations for mode in modes if one.method.lower() == "post"]
    plain = [(one, mode) for one in operations for mode in modes if one.method.lower() == "get"]
    left = count
    for place, (operation, mode) in enumerate([*plain, *rich]):
        if not left:
            return
        share = 5 if place < len(plain) else -(-left // (len(plain) + len(rich) - place))
        for value in drawn(operation.as_strategy(generation_mode=mode), min(share, left), number + place):
            prepared = _prepared(value)
            if prepared is not None:
                left -= 1
                yield _of_schema(prepared, left, next(ids))
    if left and left < count:  # what could not be sent or was all there is
        yield from _schema(left, number + 1000, ids)


def _prepared(case: Any) -> requests.PreparedRequest | None:
    """What would go over the wire; None for what HTTP has no form for."""
    try:
        parts = case.as_transport_kwargs("http://fuzz")
        return requests.Request(**{name: value for name, value in parts.items() if name in _REQUEST}).prepare()
    except (requests.RequestException, ValueError):
        return None


_REQUEST: Final = frozenset("method url headers files data params auth cookies json".split())
_FRAMING: Final = frozenset(
    "host connection content-length transfer-encoding x-request-id x-schemathesis-testcaseid".split()
)
BOUNDARY: Final = re.compile("boundary=([0-9a-f]{32})")
_CREDENTIALS: Final = frozenset(["authorization", "x-api-key"])


def _of_schema(made: requests.PreparedRequest, place: int, case_id: bytes) -> Case:
    body = made.body or b""
    body = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    dropped = _FRAMING if place % WITHOUT_KEY == 0 else _FRAMING | _CREDENTIALS
    headers = [(name.encode(), _bytes(value)) for name, value in made.headers.items() if name.lower() not in dropped]
    if place % WITHOUT_KEY:
        headers += with_key(place)
    method, target = str(made.method), made.path_url.encode()
    if found := BOUNDARY.search(str(made.headers.get("content-type", ""))):  # drawn by chance, not from the seed
        random, same = found[1].encode(), b"0" * 32
        body, headers = body.replace(random, same), [(name, value.replace(random, same)) for name, value in headers]
    framed = not any(b"\r" in value or b"\n" in value or b"\0" in value for _, value in headers)
    data = request(method, target, headers, body, case_id, chunked=bool(body) and place % 5 == 0)
    return Case("schema", case_id, data, body, framed, method == "HEAD" or b"watch=1" in target)


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")


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


def _decoding(count: int, number: int, ids: Ids) -> Iterator[Case]:
    strategy = st.tuples(st.sampled_from(JSON_ROUTES), BODIES, st.sampled_from(TYPES))
    for place, (route, body, kind) in enumerate(_enough(strategy, count, number)):
        yield _post("decoding", route, [(b"content-type", kind)], body, next(ids), place)


def _post(family: str, route: Route, headers: Pairs, body: bytes, case_id: bytes, place: int) -> Case:
    target = route.name.encode()
    data = request("POST", target, with_key(place) + headers, body, case_id, chunked=place % 4 == 0)
    return Case(family, case_id, data, body)


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


def _lanes(count: int, number: int, ids: Ids) -> Iterator[Case]:
    strategy = st.tuples(st.sampled_from(JSON_ROUTES), FIELDS, LIMITS)
    for place, (route, fields, limits) in enumerate(_enough(strategy, count, number)):
        body = json.dumps(body_for(route.name) | fields).encode()
        yield _post("lanes", route, [(b"content-type", b"application/json"), *limits], body, next(ids), place)


def _enough(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """Exactly so many, from as many seeds as that takes."""
    seen: list[Any] = []
    while len(seen) < count:
        seen += drawn(strategy, count - len(seen), number + len(seen))
    return seen


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


TARGETS: Final = st.builds(
    _disguise,
    st.sampled_from([route.name for route in ROUTES] + ["/docs", "/v1/load_lora_adapter", "/fake/counts", "/sleep"]),
    st.integers(0, 100),
    st.integers(0, 20),
    st.text(st.characters(codec="latin-1", exclude_characters=" \r\n\t\0"), max_size=12),
)


def _targets(count: int, number: int, ids: Ids) -> Iterator[Case]:
    strategy = st.tuples(st.sampled_from(METHODS + ["POST", "GET"] * 4), TARGETS)
    for place, (method, target) in enumerate(_enough(strategy, count, number)):
        case_id = next(ids)
        body = b'{"model":"m","messages":[]}' if method in ("POST", "PUT", "PATCH") else b""
        data = request(method, target.encode("latin-1"), with_key(place), body, case_id)
        # After CONNECT and in what is no HTTP the parser may find no end: then none has to be told.
        yield Case("targets", case_id, data, body, method in ("GET", "POST", "OPTIONS"), method == "HEAD")


# --- wishes: valid requests that would rather speak another protocol, as some clients' all do -------------------------

WISHES: Final = st.tuples(
    st.sampled_from(JSON_ROUTES), st.sampled_from([b"h2c", b"websocket", b"TLS/1.2, h2c", b"x"]), st.booleans()
)


def _wishes(count: int, number: int, ids: Ids) -> Iterator[Case]:
    for route, protocol, chunked in _enough(WISHES, count, number):
        body = json.dumps(body_for(route.name)).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"upgrade"), (b"upgrade", protocol)]
        case_id = next(ids)
        data = request("POST", route.name.encode(), with_key(1) + headers, body, case_id, chunked=chunked)
        yield Case("wishes", case_id, data, body, served=True)


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


def _heads(count: int, number: int, ids: Ids) -> Iterator[Case]:
    for place, parts in enumerate(_enough(HEADS, count, number)):
        case_id = next(ids)
        first = b" ".join([parts["method"].encode(), parts["target"], parts["version"]])
        whole = [b"%b: %b" % pair for pair in [(b"host", b"fuzz"), (ID, case_id), *with_key(place)]]
        fuzzed = [name + parts["separator"] + worth for name, worth in parts["headers"]]
        data = parts["end"].join([first, *whole, *fuzzed, b"", b""]) + parts["frame"]
        yield Case("heads", case_id, data, framed=False, head_only=parts["method"] == "HEAD")


FAMILIES: Final[dict[str, Callable[[int, int, Ids], Iterator[Case]]]] = {
    "schema": _schema,
    "decoding": _decoding,
    "lanes": _lanes,
    "targets": _targets,
    "wishes": _wishes,
    "heads": _heads,
}
