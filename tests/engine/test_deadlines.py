"""When time is up, the client is told and the engine stops working, wherever the request is at that moment."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest

from tests.engine.clients import BUSY_S, ENDLESS, Watch, held, raw, words
from tests.engine.conftest import Measure, Start
from tests.engine.real import SLOTS, Vllm
from tests.harness import COMPLETIONS, Gateway, refused
from tests.wire import Json, data_of, events_of

PROMPTS = 8
BOUND_S = 2.5  # ten times what it should take at most; the figure itself is in the summary
STRETCH = 4  # three more processes take part, and each may stand still as long as this one did
TRIES = 4  # on a machine so busy that a request doesn't reach the engine in time, each with twice the time


def long_prompts() -> Json:
    """Seconds of prefill, and nothing of it known from an earlier request."""
    prompts = [[random.randrange(100, 40_000) for _ in range(8000)] for _ in range(PROMPTS)]
    return words(1, prompts)


def endless() -> Json:
    """Many seconds of decoding."""
    return words(ENDLESS)


@dataclass(frozen=True)
class Place:
    """Where the deadline finds a request; without one in milliseconds it is half of what the work takes."""

    body: Callable[[], Json]
    deadline_ms: int | None = None
    busy: int = 0  # sequences that the engine runs meanwhile
    may_finish: int = 0


PLACES = {
    "in prefill": Place(long_prompts, may_finish=PROMPTS - 1),
    "in decode": Place(endless, 1500),
    "queued inside the engine": Place(endless, 1500, busy=SLOTS),
}


@dataclass(frozen=True)
class Expired:
    """A request whose deadline passed; times are those of the monotonic clock."""

    answer: httpx.Response
    deadline: float
    answered: float
    stopped: float  # when the engine's load was back to what it had been
    rest: tuple[int, int]
    seen: list[tuple[float, int, int]]
    more: Callable[..., float]  # by how much a counter of the gateway went up
    made: float  # requests that the engine has answered in full
    bound_s: float

    @property
    def reached_the_engine(self) -> bool:
        """Whether it was seen there before its deadline; else this shows nothing."""
        return any(at < self.deadline and (running, waiting) > self.rest for at, running, waiting in self.seen)


async def expire(gate: Gateway, vllm: Vllm, place: Place, times: int, *, stream: bool) -> Expired:
    """Let a request run into its deadline."""
    deadline_ms = place.deadline_ms or await half_of_what_it_takes(gate, place.body())
    body = {**place.body(), "stream": stream}
    headers = {"x-request-timeout-ms": str(deadline_ms * (times if place.deadline_ms else 1))}
    async with held(gate, place.busy), Watch(gate) as watch, raw(gate) as client:
        rest, before, made = watch.now, gate.metrics(), answered_by(vllm)
        sent = time.monotonic()
        answer = await client.post(COMPLETIONS, json=body, headers=headers)
        answered = time.monotonic()
        stopped = await watch.back_to(rest, since=answered)
        made = answered_by(vllm) - made
    after = gate.metrics()
    more = lambda name, **labels: after.total(name, **labels) - before.total(name, **labels)  # noqa: E731
    deadline = sent + int(headers["x-request-timeout-ms"]) / 1000
    return Expired(answer, deadline, answered, stopped, rest, watch.seen, more, made, bound_of(watch))


def answered_by(vllm: Vllm) -> float:
    """Requests that the engine has answered in full. It is asked itself: the gateway doesn't wait long for it."""
    return vllm.metrics().total("vllm:request_success_total")


def bound_of(watch: Watch) -> float:
    """Seconds within which it must be over on this machine, busy as it is."""
    return BOUND_S + STRETCH * watch.stood_still_s


async def half_of_what_it_takes(gate: Gateway, body: Json) -> int:
    """Milliseconds, on this machine and now."""
    sent = time.monotonic()
    async with raw(gate) as client:
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    return int((time.monotonic() - sent) * 500)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("where", PLACES)
async def test_the_engine_stops_at_the_deadline(
    gateway: Start, vllm: Vllm, measure: Measure, where: str, stream: bool
) -> None:
    gate, place = gateway(max_in_flight=4 * SLOTS), PLACES[where]
    for attempt in range(TRIES):
        it = await expire(gate, vllm, place, 2**attempt, stream=stream)
        if it.reached_the_engine:
            break
    else:
        pytest.fail("the request was never seen at the engine in time")

    if place.busy:
        during = [(running, waiting) for at, running, waiting in it.seen if at <= it.stopped]
        assert {running for running, _ in during} == {SLOTS}
        assert max(waiting for _, waiting in during) == 1

    begun = where == "in decode" or it.answer.status_code == 200  # in prefill one of the prompts may be done already
    if stream and begun:
        assert it.answer.status_code == 200
        events = events_of(it.answer.content)
        assert len(events) >= 3
        assert data_of(events[-2])["error"]["code"] == "deadline_exceeded"
        assert events[-1] == b"data: [DONE]"
    else:
        assert "first byte" in refused(it.answer, "deadline")

    assert it.made <= place.may_finish, "the engine made the answer all the same"
    assert it.more("tidegate_engine_aborts_total", cause="deadline") == 1
    assert it.more("tidegate_deadline_exceeded_total") == 1
    measure("client told", it.answered - it.deadline)
    measure("engine free", it.stopped - it.deadline)
    assert it.answered - it.deadline < it.bound_s
    assert it.stopped - it.deadline < it.bound_s


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_the_engine_stops_when_the_client_leaves(
    gateway: Start, vllm: Vllm, measure: Measure, stream: bool
) -> None:
    gate = gateway()
    async with Watch(gate) as watch:
        async with await gate.wire() as wire:
            before, made = gate.metrics(), answered_by(vllm)
            await wire.request(COMPLETIONS, {**endless(), "stream": stream})
            if stream:
                assert (await wire.read_head(BUSY_S))[0] == 200
            await watch.reaches(lambda running, _: running == 1, "a running request")
        left = time.monotonic()
        stopped = await watch.back_to((0, 0), since=left)
    measure("engine free", stopped - left)
    assert stopped - left < bound_of(watch)
    await asyncio.to_thread(gate.quiet)
    after = gate.metrics()
    for name in ("tidegate_engine_aborts_total", "tidegate_requests_total"):
        assert after.total(name) - before.total(name) == 1
    assert answered_by(vllm) == made


async def test_all_slots_are_free_again_after_many_clients_have_left(gateway: Start) -> None:
    gate = gateway()
    async with held(gate, SLOTS):
        assert gate.stats()["in_flight"] == SLOTS
    await asyncio.to_thread(gate.quiet)
    async with raw(gate) as client:
        assert (await client.post(COMPLETIONS, json=words(4))).status_code == 200


async def test_a_bound_on_the_first_token_ends_a_slow_prefill(gateway: Start) -> None:
    async with raw(gateway()) as client:
        body = {**long_prompts(), "stream": True}
        answer = await client.post(COMPLETIONS, json=body, headers={"x-slo-ttft-ms": "50"})
    assert "first byte" in refused(answer, "deadline")


async def test_a_bound_on_the_first_token_does_not_end_a_stream_that_has_begun(gateway: Start) -> None:
    async with await gateway().wire() as wire:
        sent = time.monotonic()
        await wire.request(COMPLETIONS, {**endless(), "stream": True}, headers={"x-slo-ttft-ms": "2000"})
        status, headers = await wire.read_head(BUSY_S)
        assert status == 200
        async for piece in wire.pieces(headers, BUSY_S):
            assert b'"error":' not in piece
            if time.monotonic() - sent > 2.5:
                break
