"""One call: what ends it early, and that its client gets an answer even while it is still sending."""

import asyncio
import json
from collections import deque
from typing import Any

import pytest

from app.call import ABORT, CLOSE, DISCARD_BYTES, DISCARD_S, Call, ClientLeft
from app.deadline import Deadline, from_headers
from app.errors import DEADLINE, INVALID, QUEUE_FULL, TOO_LARGE, Refused
from app.lanes import Demand
from app.routes import FORWARDED
from tests.unit.virtual_time import loops

LOOPS = loops()
ARRIVED = 1000.0
Message = dict[str, Any]
PIECE: Message = {"type": "http.request", "body": b"x" * 65536, "more_body": True}
LAST: Message = {"type": "http.request", "body": b"x", "more_body": False}
LEFT: Message = {"type": "http.disconnect"}


class Client:
    """The other end: gives its messages, each after `pause_s`, then waits for ever; keeps what it gets."""

    def __init__(self, *messages: Message, pause_s: float = 0.0, path: str = "/v1/completions", **headers: str) -> None:
        self.messages = deque(messages)
        self.pause_s = pause_s
        self.got: list[Message] = []
        self.ended: list[str] = []
        self.scope = {
            "type": "http",
            "raw_path": path.encode(),
            "headers": [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()],
            CLOSE: lambda: self.ended.append("closed"),
            ABORT: lambda: self.ended.append("aborted"),
        }

    def call(self) -> Call:
        return Call(self.scope, self.receive, self.send)  # type: ignore[arg-type]

    async def receive(self) -> Message:
        await asyncio.sleep(self.pause_s)
        return self.messages.popleft() if self.messages else await asyncio.get_running_loop().create_future()

    async def send(self, message: Message) -> None:  # type: ignore[override,unused-ignore]
        self.got.append(message)

    @property
    def head(self) -> dict[bytes, bytes]:
        return dict(self.got[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.got[1:])

    @property
    def whole(self) -> bool:
        return not self.got[-1]["more_body"]


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def still_usable() -> bool:
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


class TestId:
    @pytest.mark.parametrize("offered", ["abc", "a" * 128, "trace:1/2+3=@x._-"])
    async def test_is_the_clients_own(self, offered: str) -> None:
        assert Client(x_request_id=offered).call().id == offered.encode()

    @pytest.mark.parametrize("offered", ["", "a" * 129, "a b", "a\tb", 'a"b', "\xe4", "<script>", "a,b"])
    async def test_is_a_fresh_one_where_the_clients_own_could_do_harm(self, offered: str) -> None:
        ids = {Client(x_request_id=offered).call().id for _ in range(2)} | {Client().call().id}
        assert len(ids) == 3
        assert {len(one) for one in ids} == {32}


async def serve(call: Call, *timers: tuple[Any, ...]) -> None:
    """Set these timers one after the other, then wait until something ends the call."""
    with call.interruptible():
        for timer in timers:
            call.arm(*timer)
        await for_ever()


class TestInterrupt:
    async def test_ends_the_wait_with_its_cause_and_nothing_after_it(self) -> None:
        call = Client().call()
        asyncio.get_running_loop().call_later(1, call.interrupt, ClientLeft())
        with pytest.raises(ClientLeft):
            await serve(call)
        await asyncio.sleep(1)
        assert still_usable()

    async def test_the_first_cause_counts(self) -> None:
        call = Client().call()
        asyncio.get_running_loop().call_at(ARRIVED + 5, call.interrupt, ClientLeft())
        with pytest.raises(ClientLeft):
            await serve(call, (ARRIVED + 5,))
        await asyncio.sleep(1)
        assert still_usable()

    async def test_after_the_call_is_over_it_does_nothing(self) -> None:
        call = Client().call()
        call.interrupt(ClientLeft())
        with call.interruptible():
            call.arm(ARRIVED + 5)
        call.interrupt(ClientLeft())
        await asyncio.sleep(10)
        assert still_usable()

    async def test_in_the_tick_in_which_the_wait_is_over_is_not_lost_or_late(self) -> None:
        call, ready = Client().call(), asyncio.Event()

        def both() -> None:
            ready.set()
            call.interrupt(ClientLeft())

        asyncio.get_running_loop().call_later(1, both)
        with pytest.raises(ClientLeft), call.interruptible():
            await ready.wait()
        await asyncio.sleep(1)
        assert still_usable()

    async def test_a_cancellation_from_elsewhere_stays_one(self) -> None:
        task = asyncio.create_task(serve(Client().call()))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    async def test_a_client_that_leaves_ends_its_call(self) -> None:
        call = Client(LAST, LEFT, pause_s=1).call()
        watcher = asyncio.create_task(call.watch())
        with pytest.raises(ClientLeft):
            await serve(call)
        await watcher
        assert asyncio.get_running_loop().time() == pytest.approx(ARRIVED + 2)


class TestTimer:
    async def test_ends_the_call_with_a_504_that_names_the_phase(self) -> None:
        call = Client().call()
        call.phase = "queue"
        with pytest.raises(Refused, match=r"after 2\.500 s, in phase: queue") as caught:
            await serve(call, (ARRIVED + 2.5,))
        assert caught.value.kind is DEADLINE

    async def test_the_last_one_set_counts(self) -> None:
        with pytest.raises(KeyError):
            await serve(Client().call(), (ARRIVED + 1,), (ARRIVED + 3, KeyError))
        assert asyncio.get_running_loop().time() == pytest.approx(ARRIVED + 3)

    async def test_a_time_in_the_past_ends_it_at_once(self) -> None:
        with pytest.raises(Refused):
            await serve(Client().call(), (ARRIVED - 5,))
        assert asyncio.get_running_loop().time() == pytest.approx(ARRIVED)

    async def test_switched_off_it_does_not_end_the_call(self) -> None:
        call = Client().call()
        with call.interruptible():
            call.arm(ARRIVED + 1)
            call.disarm()
            await asyncio.sleep(5)


class TestAnswer:
    async def test_after_the_whole_body_is_one_head_and_one_piece(self) -> None:
        client = Client(x_request_id="me")
        call = client.call()
        call.body_read = True
        await call.answer(418, [(b"x-a", b"1")], b"{}")
        assert [message["type"] for message in client.got] == ["http.response.start", "http.response.body"]
        assert (client.got[0]["status"], client.body, client.whole, client.ended) == (418, b"{}", True, [])
        assert client.head == {
            b"x-a": b"1",
            b"content-type": b"application/json",
            b"content-length": b"2",
            b"x-request-id": b"me",
        }
        assert call.head_sent

    @pytest.mark.parametrize("last", [LAST, LEFT], ids=["sends it all", "leaves"])
    async def test_to_a_client_that_still_sends_goes_out_at_once_and_hears_it_out(self, last: Message) -> None:
        client = Client(*[PIECE] * 100, last, pause_s=0.01)
        answering = asyncio.create_task(client.call().answer(413, [], b"{}"))
        await asyncio.sleep(0.005)
        assert (client.body, client.whole) == (b"{}", False)
        await answering
        assert (client.body, client.whole, client.ended) == (b"{}", True, [])
        assert not client.messages

    async def test_to_a_client_that_sends_too_much_closes_the_connection(self) -> None:
        client = Client(*[PIECE] * 1000)
        await client.call().answer(413, [], b"{}")
        assert (client.body, client.whole, client.ended) == (b"{}", True, ["closed"])
        discarded = (1000 - len(client.messages)) * len(PIECE["body"])
        assert DISCARD_BYTES < discarded <= DISCARD_BYTES + 2 * len(PIECE["body"])

    @pytest.mark.parametrize("pause_s", [0.5, 100])
    async def test_to_a_client_that_sends_too_slowly_closes_the_connection(self, pause_s: float) -> None:
        client = Client(*[PIECE] * 100, pause_s=pause_s)
        await client.call().answer(413, [], b"{}")
        assert (client.whole, client.ended) == (True, ["closed"])
        assert asyncio.get_running_loop().time() == pytest.approx(ARRIVED + DISCARD_S)

    async def test_to_a_client_that_waits_for_a_go_ahead_does_not_wait_for_its_body(self) -> None:
        client = Client(expect="100-continue")
        await client.call().answer(413, [], b"{}")
        assert (client.body, client.whole, client.ended) == (b"{}", True, ["closed"])

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/messages/count_tokens"])
    async def test_a_refusal_is_an_error_object_in_the_form_of_the_route(self, path: str) -> None:
        client = Client(LAST, path=path)
        await client.call().refuse(Refused(TOO_LARGE, "Too large."))
        assert client.got[0]["status"] == 413
        assert client.head[b"x-tidegate-reason"] == b"request_too_large"
        assert ("type" in json.loads(client.body)) is (path != "/v1/completions")

    @pytest.mark.parametrize("shed_status", [None, 429])
    async def test_shed_load_takes_the_status_of_the_settings(self, shed_status: int | None) -> None:
        client = Client(LAST)
        await client.call().refuse(Refused(QUEUE_FULL, "Full."), shed_status)
        assert client.got[0]["status"] == shed_status or client.got[0]["status"] == 503

    async def test_on_a_server_without_our_hooks_still_goes_out(self) -> None:
        client = Client(*[PIECE] * 1000)
        del client.scope[CLOSE], client.scope[ABORT]
        call = client.call()
        await call.answer(413, [], b"{}")
        call.abort()
        assert client.whole


async def test_a_broken_off_answer_is_not_made_whole() -> None:
    client = Client()
    call = client.call()
    await call.send_head(200, [])
    await call.send(b"half")
    call.abort()
    assert (client.whole, client.ended, call.sent_bytes) == (False, ["aborted"], 4)


async def test_a_repeated_deadline_header_loosens_nothing() -> None:
    client = Client()
    client.scope["headers"] = [(b"x-request-timeout-ms", b"100"), (b"x-request-timeout-ms", b"100000")]
    try:
        deadline = from_headers(client.call().headers, ARRIVED, 600)
    except Refused as refused:
        assert refused.kind is INVALID  # noqa: PT017 - one of two good ends
    else:
        assert deadline.at == ARRIVED + 0.1


async def test_the_log_says_when_and_how_long_and_nothing_of_what_was_asked() -> None:
    call = Client(authorization="Bearer s3cret", cookie="s3cret", x_request_id="me").call()
    call.route = next(route for route in FORWARDED if route.name == "/v1/completions")
    call.deadline = Deadline(ARRIVED, ARRIVED + 9, ARRIVED + 9)
    call.key, call.demand, call.outcome, call.status, call.sent_bytes = (
        "alice",
        Demand("long", 9, 2),
        "completed",
        200,
        5,
    )
    call.queued_at, call.admitted_at, call.head_at = ARRIVED + 1, ARRIVED + 3, ARRIVED + 4
    fields = call.log_fields(ARRIVED + 6)
    assert fields == {
        "id": "me",
        "route": "/v1/completions",
        "key": "alice",
        "lane": "long",
        "weight": 2,
        "status": 200,
        "outcome": "completed",
        "queue_ms": 2000,
        "first_byte_ms": 4000,
        "total_ms": 6000,
        "bytes": 5,
        "trace_id": None,
    }
    assert "s3cret" not in json.dumps(fields)


@pytest.mark.parametrize(("queued_at", "queue_ms"), [(None, None), (ARRIVED + 1, 1500)])
async def test_the_log_of_a_call_that_was_never_admitted_says_how_long_it_waited(
    queued_at: float | None, queue_ms: float | None
) -> None:
    call = Client().call()
    call.queued_at = queued_at
    assert call.log_fields(ARRIVED + 2.5)["queue_ms"] == queue_ms
