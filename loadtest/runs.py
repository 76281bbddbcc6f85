"""One run of an arm, and the engine's capacity: what every experiment here is made of."""

import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count, islice
from typing import Final

from loadtest.arms import MODEL, Stage, Target
from loadtest.client import Address, NotServed, Shot, closed_loop, load, open_loop
from loadtest.outcomes import Metrics, Record, summarise
from loadtest.processes import ServerFailed, machine_cpu_s
from loadtest.report import progress
from loadtest.workload import KINDS, SHORT, Kind, Request, endless

IN_FLIGHT: Final = 24  # while capacity is measured: the engine's 16, and always one that can follow
WARM_S: Final = 3.0  # left out of the measurement: all begin at once
WARM_UP_S: Final = 30.0  # for each of the following
WARM_UP: Final = 4  # requests before each run: fewer than Tidegate learns from
LATE_CLIENT_MS: Final = 50.0
FOREIGN_CORES: Final = 0.2  # more of the machine in use by others, and one measures them
MOST_CONNECTIONS: Final = 65_536

salts = (f"run{number:03d}" for number in count(1))
Sending = Callable[[Address, Sequence[Shot], float, Callable[[str], None]], Awaitable[list[Record]]]


async def measure_capacity(
    stage: Stage, mix: str, seed: int, measure_s: float, kinds: tuple[Kind, Kind] = KINDS
) -> float:
    """Requests a second that the engine completes when it always has enough to do.

    Raises:
        NotServed, ServerFailed: it failed, or completed none.
    """
    engine = await stage.engine()
    progress(f"measuring capacity: {IN_FLIGHT} in flight for {WARM_S + measure_s:g} s")
    salt = next(salts)
    shots = (load(request, MODEL, salt) for request in endless(mix, seed, kinds))
    ended = await closed_loop(engine.address, shots, IN_FLIGHT, WARM_S, measure_s)
    if not ended:
        raise ServerFailed(f"the engine completed nothing in {measure_s:g} s")
    return len(ended) / measure_s


async def run(
    target: Target, requests: Sequence[Request], seconds: float, grace_s: float, name: str, send: Sending = open_loop
) -> tuple[Metrics, list[Record]]:
    """One arm, one schedule of arrivals over `seconds`; after `grace_s` more the client gives up.

    Raises:
        NotServed, ServerFailed: a request failed without any load, or the engine does not come to rest.
    """
    await _warm_up(target, requests)
    salt = next(salts)
    shots = [load(request, target.model, salt) for request in requests]
    before, spent, began = await _generated(target), spent_s(target), time.monotonic()
    records = await send(target.address, shots, seconds + grace_s, lambda text: progress(f"  {name}, {text}"))
    spent = {party: seconds - spent[party] for party, seconds in spent_s(target).items()}
    took = time.monotonic() - began
    await target.until_idle()
    after = await _generated(target)
    made = None if before is None or after is None else after - before
    metrics = summarise(records, seconds, made) | shares(spent)
    progress(f"{name}: goodput {metrics['goodput']:.1f} req/s{_doubts(metrics, took)}")
    return metrics, records


def _doubts(metrics: Metrics, took: float) -> str:
    """What makes the figures of a run that took so many seconds doubtful."""
    found = ""
    if (lag := metrics["lag_p99_ms"] or 0.0) > LATE_CLIENT_MS:
        found += f"; WARNING: the client was late by {lag:.0f} ms (p99)"
    return found + disturbed((metrics["others_cpu_s"] or 0.0) / took)


def disturbed(cores: float) -> str:
    """What to say when others used so much of the machine meanwhile."""
    return f"; WARNING: other processes took {cores:.1f} cores meanwhile" if cores > FOREIGN_CORES else ""


async def _warm_up(target: Target, requests: Sequence[Request]) -> None:
    """A few requests one by one: the first ones of any server find nothing ready.

    Raises:
        NotServed: one of them failed.
    """
    salt = next(salts)
    kind = min((request.kind for request in requests), key=lambda kind: kind.limit_s, default=SHORT)
    few = islice(endless(SHORT.name, 0, (kind, kind)), WARM_UP)
    for shot in [load(request, target.model, salt) for request in few]:
        (record,) = await open_loop(target.address, [shot], WARM_UP_S, progress)
        if not record.whole:
            raise NotServed(f"a request without any load got status {record.status}, {record.error or 'no end mark'}")


async def _generated(target: Target) -> float | None:
    """Tokens made since its start; None if it doesn't say, which is not the same as none made."""
    work = await target.engine.work()
    return work.tokens if work else None


def spent_s(target: Target) -> dict[str, float]:
    """CPU seconds so far; a gateway or an engine that was not measured alone shows in `machine`."""
    return {
        "client": time.process_time(),
        "gateway": target.gateway.child.cpu_s() if target.gateway else 0.0,
        "engine": target.engine.child.cpu_s(),
        "machine": machine_cpu_s(),
    }


def shares(spent: dict[str, float]) -> dict[str, float]:
    """CPU seconds of each party, and of others on the machine, from what was spent meanwhile."""
    others = spent["machine"] - spent["client"] - spent["gateway"] - spent["engine"]
    parties = {"client": spent["client"], "gateway": spent["gateway"], "engine": spent["engine"], "others": others}
    return {f"{party}_cpu_s": max(0.0, seconds) for party, seconds in parties.items()}


def allow_many_connections() -> None:
    """Under overload there are as many as there are unanswered requests; children inherit the limit."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS if most == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
