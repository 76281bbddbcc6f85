"""SIGTERM: what is in the house ends whole, newcomers are told, and the exit code says whether anybody was cut."""

import asyncio
import signal
import socket
from collections.abc import Callable

import pytest

from tests.gateway.conftest import Start
from tests.gateway.test_heads import check_error_end
from tests.harness import TERM, Gateway, chat, occupied, queued, refused, until
from tests.wire import CHAT

pytestmark = pytest.mark.slow

SLOW = {"events": 40, "gap_ms": 50, "tag": "slow"}


def port_is_free(port: int) -> bool:
    """Whether another server could listen there now."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def ended(gate: Gateway) -> int:
    """The exit code, once there is one."""
    await until(lambda: not gate.running, "the gateway's end")
    return gate.exit_code()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_idle_gateway_ends_at_once(gateway: Start, number: int) -> None:
    gate = gateway(fresh=True)
    gate.signal(number)
    assert await ended(gate) == 0
    assert port_is_free(gate.port)
    assert "Traceback" not in gate.log


async def test_idle_keepalive_connection_does_not_hold_the_end_up(gateway: Start) -> None:
    gate = gateway(fresh=True)
    async with gate.client() as client, await gate.wire():
        await client.get("/stats")
        gate.signal(TERM)
        assert await ended(gate) == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_what_runs_ends_whole_and_newcomers_are_told(gateway: Start, stream: bool) -> None:
    gate = gateway(fresh=True)
    async with gate.client() as client:
        call = asyncio.create_task(client.post(CHAT, json=chat(stream=stream, fake=SLOW)))
        await until(lambda: gate.engine.counts()["running"] == 1)
        gate.signal(TERM)
        await until(lambda: gate.get("/readyz").status_code == 503)
        assert gate.get("/livez").status_code == 200
        assert gate.metrics().total("tidegate_draining") == 1
        refused(await client.post(CHAT, json=chat()), "draining")
        answer = await call
    assert answer.status_code == 200
    assert answer.text.count("w") >= 40
    assert await ended(gate) == 0
    assert gate.engine.entry("slow")["outcome"] == "finished"


async def test_a_retry_on_a_kept_connection_does_not_meet_the_draining_instance_again(gateway: Start) -> None:
    gate = gateway(fresh=True, max_in_flight=2)
    async with occupied(gate), await gate.wire() as kept:
        await kept.request(CHAT, chat())
        assert (await kept.answer()).status_code == 200
        gate.signal(TERM)
        await until(lambda: gate.get("/readyz").status_code == 503)
        await kept.request(CHAT, chat())
        refused(await kept.answer(), "draining")
        assert await kept.reader.read() == b"", "the connection ends with the refusal"


async def test_what_waits_and_what_uploads_may_finish_too(gateway: Start) -> None:
    gate = gateway(fresh=True, max_in_flight=1, max_queue=5)
    data = b'{"model": "m", "messages": [], "max_tokens": 1}'
    async with await gate.wire() as uploader, gate.client() as client, occupied(gate):
        await uploader.request(CHAT, data[:5], length=len(data))
        waiting = asyncio.create_task(client.post(CHAT, json=chat()))
        await queued(gate, 1)
        gate.signal(TERM)
        await until(lambda: gate.get("/readyz").status_code == 503)
        await uploader.send(data[5:])
        await queued(gate, 2)
        gate.engine.cut(which="busy")
        assert (await waiting).status_code == 200
        assert (await uploader.answer()).status_code == 200
    assert await ended(gate) == 0


async def test_what_is_left_after_the_drain_time_gets_its_error(gateway: Start) -> None:
    gate = gateway(fresh=True, drain_s=0.5, max_in_flight=2, max_queue=5)
    async with await gate.wire() as plain, gate.client() as client, occupied(gate) as (stream,):
        await plain.request(CHAT, chat(fake={"fault": "stall"}))
        await until(lambda: gate.engine.counts()["running"] == 2)
        waiting = asyncio.create_task(client.post(CHAT, json=chat()))
        await queued(gate, 1)
        gate.signal(TERM)
        cut = await plain.answer()
        assert cut.status_code in (503, 504)
        assert cut.json()["error"]["code"] in ("server_draining", "deadline_exceeded")
        assert (await waiting).status_code in (503, 504)
        streamed = await stream.answer()
        assert (streamed.status_code, streamed.whole) == (200, True)
        check_error_end(streamed.body, streamed_code(streamed.body), CHAT)
    assert await ended(gate) == 3
    await until(lambda: gate.engine.counts()["running"] == 0, "abort of the work at the engine")


def streamed_code(body: bytes) -> str:
    """Which of the two errors a cut stream ended with."""
    return "server_draining" if b"server_draining" in body else "deadline_exceeded"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_goes_straight_to_the_end(gateway: Start, second: int) -> None:
    gate = gateway(fresh=True)
    async with occupied(gate) as (stream,):
        gate.signal(TERM)
        await until(lambda: gate.get("/readyz").status_code == 503)
        gate.signal(second)
        answer = await stream.answer()
        assert answer.status_code == 200
        assert not answer.whole or b'"error"' in answer.body, "never an end that looks like success"
    assert await ended(gate) == 3
    assert port_is_free(gate.port)


@pytest.mark.parametrize("hold", ["stalled reader", "half an upload", "half a head"])
async def test_a_client_that_does_nothing_cannot_hold_the_process(gateway: Start, hold: str) -> None:
    gate = gateway(fresh=True, drain_s=0.5)
    async with await gate.wire(receive_buffer=8192) as wire:
        if hold == "stalled reader":
            await wire.request(CHAT, chat(stream=True, fake={"events": 100, "size": 1_000_000}))
            await until(lambda: gate.engine.counts()["running"] == 1)
        elif hold == "half an upload":
            await wire.request(CHAT, b"{", length=100)
            await until(lambda: gate.stats()["total_requests"] == 1)
        else:
            await wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")
        gate.signal(TERM)
        assert await ended(gate) == (0 if hold == "half a head" else 3)


async def test_both_ports_answer_until_the_end(gateway: Start) -> None:
    from tests.harness import free_port

    gate = gateway(fresh=True, ops_port=free_port())
    async with occupied(gate) as (stream,):
        gate.signal(TERM)
        await until(lambda: gate.get("/readyz").status_code == 503)
        checks: list[Callable[[], int]] = [lambda: gate.get("/livez").status_code, lambda: gate.get("/").status_code]
        assert [check() for check in checks] == [200, 200]
        stream.reset()
    assert await ended(gate) in (0, 3)
    assert port_is_free(gate.ops_port)
