"""What must not get in, get out, or fill up, beyond what the tests of routes, bounds and relay show."""

import asyncio
import contextlib
import http.client
import json
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.crowd import PIPELINED
from tests.gateway.conftest import Start
from tests.gateway.test_routes import ask
from tests.harness import FakeEngine, Gateway, body_for, chat, free_port, refused, until
from tests.wire import CHAT, Cut, Wire

KEYS = "team-a:value-of-a,team-b:value-of-b"
SPOOFED = {
    "forwarded": "for=1.2.3.4",
    "x-forwarded-for": "1.2.3.4",
    "x-forwarded-host": "evil.example",
    "x-real-ip": "1.2.3.4",
    "via": "1.1 me",
    "cookie": "session=1",
    "x-data-parallel-rank": "3",
}


async def test_a_key_is_known_by_its_name_everywhere_and_by_its_value_nowhere(gateway: Start) -> None:
    gate = gateway(fresh=True, api_keys=KEYS, log_format="json")
    for value in ("value-of-a", "value-of-a", "value-of-b"):
        assert (await ask(gate, "POST", CHAT, chat(), authorization=f"Bearer {value}")).status_code == 200
    wrong = await ask(gate, "POST", CHAT, chat(), authorization="Bearer value-of-c")
    refused(wrong, "invalid_api_key")
    assert wrong.headers["www-authenticate"] == "Bearer"
    metrics = gate.metrics()
    assert metrics.of("tidegate_key_requests_total") == {
        "tidegate_key_requests_total[('key', 'team-a'), ('outcome', 'completed')]": 2,
        "tidegate_key_requests_total[('key', 'team-b'), ('outcome', 'completed')]": 1,
    }
    await until(lambda: gate.log.count('"key": "team-a"') == 2)
    shown = [gate.get(path).body.decode() for path in ("/", "/page.js", "/stats", "/metrics", "/readyz")]
    for text in (*shown, gate.log, wrong.body.decode(), repr(wrong.headers), json.dumps(gate.engine.entries())):
        assert "value-of-" not in text


async def test_a_flood_of_wrong_keys_leaves_few_lines_and_a_count(gateway: Start) -> None:
    gate = gateway(fresh=True, api_keys=KEYS)
    async with gate.client() as client:
        wrong = {"authorization": "Bearer no"}
        answers = await asyncio.gather(*(client.post(CHAT, json=chat(), headers=wrong) for _ in range(300)))
    assert {answer.status_code for answer in answers} == {401}

    def counted() -> int:
        return sum(int(count) for count in re.findall(r"left out invalid=(\d+)", gate.log))

    await until(lambda: gate.log.count("outcome=invalid") + counted() == 300)
    assert counted() > 0
    assert gate.engine.counts()["received"] == 0


async def test_forwarding_headers_and_the_choice_of_an_engines_part_end_here(gateway: Start) -> None:
    gate = gateway()
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(fake={"tag": "h"}), headers=SPOOFED)
        assert (await wire.answer()).status_code == 200
    got = {name.lower() for name, _ in gate.engine.entry("h")["headers"]}
    assert not got & SPOOFED.keys()


INSIDE = {
    "server": "uvicorn",
    "x-powered-by": "x",
    "via": "1.1 engine",
    "x-vllm-worker": "7",
    "x-tidegate-reason": "queue_full",
    "access-control-allow-origin": "*",
    "access-control-allow-credentials": "true",
}


@pytest.mark.parametrize("stream", [True, False])
async def test_engines_headers_about_its_inside_end_here_and_its_open_cors_does_not_open_the_gateway(
    gateway: Start, stream: bool
) -> None:
    """vLLM allows every origin unless told otherwise."""
    gate = gateway()
    body = chat(stream=stream, fake={"headers": INSIDE | {"x-kept": "1"}})
    answer = await ask(gate, "POST", CHAT, body, origin="https://evil.example")
    assert answer.status_code == 200
    assert answer.headers["x-kept"] == "1"
    assert not answer.headers.keys() & INSIDE.keys()


async def test_only_configured_origins_are_allowed_whatever_the_engine_says(gateway: Start) -> None:
    gate = gateway(cors_origins="https://app.example")
    body = chat(fake={"headers": INSIDE})
    good = await ask(gate, "POST", CHAT, body, origin="https://app.example")
    assert good.headers["access-control-allow-origin"] == "https://app.example"
    other = await ask(gate, "POST", CHAT, body, origin="https://evil.example")
    assert "access-control-allow-origin" not in other.headers


async def test_absolute_form_is_the_route_in_it_and_the_engine_gets_the_path_alone(gateway: Start) -> None:
    gate = gateway(api_keys=KEYS)
    answer = await ask(gate, "POST", f"http://elsewhere.example{CHAT}?a=1", chat(fake={"tag": "a"}))
    assert answer.status_code == 200
    assert gate.engine.entry("a")["target"] == f"{CHAT}?a=1"
    refused(await ask(gate, "POST", f"http://x{CHAT}", chat(), authorization="Bearer no"), "invalid_api_key")
    assert gate.engine.counts()["received"] == 1


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_wish_for_another_protocol_is_not_heard_and_leaves_no_line(gateway: Start, protocol: str) -> None:
    gate = gateway()
    headers = {"connection": "upgrade", "upgrade": protocol, "sec-websocket-key": "x", "http2-settings": "AA"}
    for _ in range(5):
        async with await gate.wire() as wire:
            await wire.request("/livez", method="GET", headers=headers)
            assert (await wire.answer()).status_code == 200
    assert "pgrade" not in gate.log
    assert "WebSocket" not in gate.log


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("upgrade", ["upgrade", "upgrade, close", "Upgrade, HTTP2-Settings"])
async def test_body_of_who_wishes_for_another_protocol_is_a_body_and_no_request(
    gateway: Start, together: bool, upgrade: str
) -> None:
    """Clients that try HTTP/2 first send it with every call; a proxy that passes the wish on sees one request."""
    gate = gateway()
    body = json.dumps(chat("GET /version HTTP/1.1\r\nhost: x\r\n\r\n", fake={"tag": "u"})).encode()
    hidden = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    for sent, status in ((body, 200), (hidden, 400)):
        async with await gate.wire() as wire:
            given = {"connection": upgrade, "upgrade": "h2c", "content-length": str(len(sent))}
            head = wire.head("POST", CHAT, given | {"content-type": "application/json"})
            await wire.send(head + sent if together else head)
            if not together:
                await asyncio.sleep(0.05)
                await wire.send(sent)
            assert (await wire.answer()).status_code == status
            if "close" not in upgrade:
                await wire.request("/livez", method="GET")
                assert (await wire.answer()).json()["status"] == "ok", "the next answer is to the next request"
    assert gate.engine.counts()["received"] == 1
    assert gate.engine.entry("u")["target"] == CHAT


async def test_what_follows_a_refused_tunnel_is_no_request(gateway: Start) -> None:
    gate = gateway()
    async with await gate.wire() as wire:
        await wire.send(wire.head("CONNECT", "/version") + wire.head("GET", "/version"))
        refused(await wire.answer(), "method_not_allowed")
        assert await wire.ended()
    assert gate.engine.counts()["received"] == 0


async def test_trailers_are_no_headers(gateway: Start) -> None:
    """Whoever filters or sets headers in front of the gateway does not do so with trailers."""
    gate = gateway(api_keys=KEYS)
    for key, status in (("x", 401), ("authorization", 200)):
        async with await gate.wire() as wire:
            head = wire.head("POST", CHAT, {"transfer-encoding": "chunked", "content-type": "application/json"})
            data = json.dumps(chat(fake={"tag": "t"})).encode()
            head = head.replace(b"authorization", key.encode())
            await wire.send(head + b"%x\r\n%b\r\n0\r\nx-api-key: value-of-a\r\nx-late: 1\r\n\r\n" % (len(data), data))
            assert (await wire.answer()).status_code == status
    assert "x-late" not in {name.lower() for name, _ in gate.engine.entry("t")["headers"]}


async def test_those_who_watch_are_bounded_and_one_more_is_told_so(gateway: Start) -> None:
    gate = gateway(fresh=True)
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(await gate.wire()) for _ in range(100)]
        for wire in wires:
            await wire.request("/stats?watch=1", method="GET")
            assert (await wire.read_head())[0] == 200
        refused(gate.get("/stats?watch=1"), "queue_full")
        assert gate.get("/stats").status_code == 200
        wires[0].reset()
        await until(lambda: watches(gate), "a place for one more")


def watches(gate: Gateway) -> bool:
    """Whether one more may watch."""
    line = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=10)
    with contextlib.closing(line):
        line.request("GET", "/stats?watch=1")
        return line.getresponse().status == 200


@pytest.mark.slow
async def test_idle_connections_never_take_the_descriptors_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeEngine() as engine:
        monkeypatch.setattr(sys, "executable", few_descriptors(tmp_path))
        with Gateway(engine) as gate:
            async with contextlib.AsyncExitStack() as stack:
                call = await stack.enter_async_context(await gate.wire())
                idle = [await stack.enter_async_context(await gate.wire()) for _ in range(500)]
                told = await asyncio.gather(*(end(wire) for wire in idle))
                assert set(told) == {None, 503}
                assert told.count(None) == 400 - 64 - 128 - 1, "less the one who calls"
                await call.request(CHAT, chat())
                assert (await call.answer()).status_code == 200, "who is in is served"
            await until(lambda: gate.get("/readyz").status_code == 200, "room after they have left")
            assert gate.log.count("as many as descriptors allow") == 1
            assert "Traceback" not in gate.log


def few_descriptors(folder: Path) -> str:
    """A Python that may have 400 of them."""
    few = folder / "python"
    few.write_text(f'#!/bin/sh\nulimit -n 400\nexec {sys.executable} "$@"\n')
    few.chmod(0o755)
    return str(few)


@pytest.mark.slow
async def test_those_who_never_shake_hands_take_no_more_descriptors_than_others_and_not_for_long(
    certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate
    with FakeEngine() as engine:
        monkeypatch.setattr(sys, "executable", few_descriptors(tmp_path))
        with Gateway(engine, tls_cert_file=str(cert), tls_key_file=str(key), ops_port=free_port()) as gate:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(500):
                    await stack.enter_async_context(await gate.wire())
                await until(lambda: "as many as descriptors allow" in gate.log)
                assert gate.get("/readyz").status_code == 200, "the ops port and the engine are there"
                async with over_tls(gate, cert) as client:
                    await eventually_answered(client)
            assert "Traceback" not in gate.log


def over_tls(gate: Gateway, cert: Path) -> httpx.AsyncClient:
    """A client that trusts that certificate."""
    trusted = ssl.create_default_context(cafile=str(cert))
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{gate.port}", verify=trusted, timeout=20)


async def eventually_answered(client: httpx.AsyncClient) -> None:
    """Once the time for shaking hands is over there is room again, while all the others still hold on."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(httpx.TransportError):
                assert (await client.get("/version")).status_code == 200
                return
            await asyncio.sleep(0.2)


async def end(wire: Wire) -> int | None:
    """The status with which a connection was closed; None while it is open."""
    try:
        status, headers = await wire.read_head(2)
    except (TimeoutError, Cut):
        return None
    assert headers["x-tidegate-reason"] == "queue_full"
    assert headers["retry-after"] == "1"
    return status


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One for 127.0.0.1 that vouches for itself."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs openssl, which is not on this machine")
    return cert, key


@pytest.mark.parametrize("stream", [True, False])
async def test_with_a_certificate_the_main_port_speaks_https(
    certificate: tuple[Path, Path], fake: FakeEngine, stream: bool
) -> None:
    cert, key = certificate
    ops = free_port()
    with Gateway(fake, tls_cert_file=str(cert), tls_key_file=str(key), ops_port=ops) as gate:
        async with over_tls(gate, cert) as client:
            body = body_for(CHAT, stream=stream, fake={"events": 3, "gap_ms": 5})
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == 200
            assert (b"data: [DONE]" in answer.content) is stream
        async with await gate.wire() as wire:
            await wire.request("/version", method="GET")
            assert await wire.ended(), "what is not TLS is hung up on"


@pytest.mark.parametrize(
    "settings",
    [{"tls_cert_file": "/nowhere.pem", "tls_key_file": "/nowhere.pem"}, {"tls_cert_file": "/nowhere.pem"}],
    ids=["no file", "no key"],
)
async def test_a_certificate_that_cannot_be_used_stops_the_start(fake: FakeEngine, settings: dict[str, Any]) -> None:
    with Gateway(fake, wait=None, **settings) as gate:
        assert await asyncio.to_thread(gate.exit_code) == 2
        assert "TIDEGATE_TLS_CERT_FILE" in gate.log
        assert "Traceback" not in gate.log


@pytest.mark.parametrize("where", ["value", "names", "trailer", "chunk extension"])
async def test_head_without_end_is_hung_up_on(gateway: Start, where: str) -> None:
    """Parsers keep what they have seen of a head; nothing else bounds it."""
    gate = gateway()
    async with await gate.wire() as wire:
        if where in ("trailer", "chunk extension"):
            await wire.start_chunked()
            await wire.send(b"2\r\n{}\r\n0" + (b";a=" if where == "chunk extension" else b"\r\nx: "))
        else:
            await wire.send(wire.head("POST", CHAT)[:-2] + b"x: ")
        piece = b"a: 1\r\n" * 10_000 if where == "names" else b"a" * 60_000
        with pytest.raises(ConnectionError):
            await send_often(wire, piece)
    assert gate.engine.counts()["received"] == 0


async def send_often(wire: Wire, piece: bytes) -> None:
    """Up to 300 MB."""
    for _ in range(5_000):
        await wire.send(piece)


async def test_requests_without_end_on_one_connection_are_hung_up_on(gateway: Start) -> None:
    """Each that waits for the one before it takes a hundred times the memory of its bytes: a few MB filled the host."""
    gate = gateway()
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(stream=True, fake={"fault": "stall", "at": 1}))
        await wire.read_head()
        await wire.send(wire.head("GET", "/livez") * (PIPELINED + 1))
        async with asyncio.timeout(20):  # the request in front of them would never end
            with contextlib.suppress(ConnectionError):
                await wire.reader.read()
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(fake={"first_ms": 100}))
        await wire.send(wire.head("GET", "/livez") * PIPELINED)
        assert [(await wire.answer()).status_code for _ in range(1 + PIPELINED)] == [200] * (1 + PIPELINED)


async def test_large_head_that_ends_is_taken(gateway: Start) -> None:
    assert (await ask(gateway(), "POST", CHAT, chat(), x_large="a" * 50_000)).status_code == 200
