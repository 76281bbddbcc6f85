"""What the fuzzer sends: requests drawn from the OpenAPI document and from what goes wrong in bodies, paths and heads.

With the same seed and count the cases are the same.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import requests
import schemathesis
import yaml
from schemathesis import GenerationMode

from app.routes import Route
from loadtest.fuzz_values import DECODING, HEADS, LANES, TARGETS, WISHES, drawn, enough
from tests.harness import body_for

DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "openapi.yaml"
KEY: Final = "fuzz-key-that-nothing-may-tell"
ID: Final = b"x-request-id"
WITHOUT_KEY: Final = 8  # one request of so many
SHARES: Final = {"schema": 0.4, "decoding": 0.2, "lanes": 0.15, "targets": 0.15, "wishes": 0.01, "heads": 0.09}
REQUEST: Final = frozenset("method url headers files data params auth cookies json".split())
FRAMING: Final = frozenset(
    "host connection content-length transfer-encoding x-request-id x-schemathesis-testcaseid".split()
)
CREDENTIALS: Final = frozenset(["authorization", "x-api-key"])
BOUNDARY: Final = re.compile("boundary=([0-9a-f]{32})")
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


def _schema(count: int, number: int, ids: Ids) -> Iterator[Case]:
    """What schemathesis makes of the document, as it should be and as it should not."""
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
        return requests.Request(**{name: value for name, value in parts.items() if name in REQUEST}).prepare()
    except (requests.RequestException, ValueError):
        return None


def _of_schema(made: requests.PreparedRequest, place: int, case_id: bytes) -> Case:
    body = _bytes(made.body or b"")
    dropped = FRAMING if place % WITHOUT_KEY == 0 else FRAMING | CREDENTIALS
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


def _decoding(count: int, number: int, ids: Ids) -> Iterator[Case]:
    """Bodies that are nearly JSON, or JSON in a way of its own."""
    for place, (route, body, kind) in enumerate(enough(DECODING, count, number)):
        yield _post("decoding", route, [(b"content-type", kind)], body, next(ids), place)


def _post(family: str, route: Route, headers: Pairs, body: bytes, case_id: bytes, place: int) -> Case:
    target = route.name.encode()
    data = request("POST", target, with_key(place) + headers, body, case_id, chunked=place % 4 == 0)
    return Case(family, case_id, data, body)


def _lanes(count: int, number: int, ids: Ids) -> Iterator[Case]:
    """Valid requests whose numbers and shapes decide about cost, weight and lane."""
    for place, (route, fields, limits) in enumerate(enough(LANES, count, number)):
        body = json.dumps(body_for(route.name) | fields).encode()
        yield _post("lanes", route, [(b"content-type", b"application/json"), *limits], body, next(ids), place)


def _targets(count: int, number: int, ids: Ids) -> Iterator[Case]:
    """Known paths in disguise, and other methods."""
    for place, (method, target) in enumerate(enough(TARGETS, count, number)):
        case_id = next(ids)
        body = b'{"model":"m","messages":[]}' if method in ("POST", "PUT", "PATCH") else b""
        data = request(method, target.encode("latin-1"), with_key(place), body, case_id)
        # After CONNECT and in what is no HTTP the parser may find no end: then none has to be told.
        yield Case("targets", case_id, data, body, method in ("GET", "POST", "OPTIONS"), method == "HEAD")


def _wishes(count: int, number: int, ids: Ids) -> Iterator[Case]:
    """Valid requests that would rather speak another protocol, as some clients' all do."""
    for route, protocol, chunked in enough(WISHES, count, number):
        body = json.dumps(body_for(route.name)).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"upgrade"), (b"upgrade", protocol)]
        case_id = next(ids)
        data = request("POST", route.name.encode(), with_key(1) + headers, body, case_id, chunked=chunked)
        yield Case("wishes", case_id, data, body, served=True)


def _heads(count: int, number: int, ids: Ids) -> Iterator[Case]:
    """Framing that two parsers could read in two ways."""
    for place, parts in enumerate(enough(HEADS, count, number)):
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
