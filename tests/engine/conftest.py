"""One real engine for all tests here, gateways in front of it by their settings, and proof of rest after every test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.engine import standstill
from tests.engine.real import SLOTS, START_S, Vllm, load
from tests.engine.tiny_model import tiny_model
from tests.harness import Gateway, wait_until

HERE = Path(__file__).parent
NOTED = "noted"  # the name of a property that the summary shows

Note = Callable[[str, object], None]
Measure = Callable[[str, float], None]


class Start(Protocol):
    """Gives a gateway in front of the shared engine; the limit is the engine's unless told otherwise."""

    def __call__(self, *, fresh: bool = False, **settings: Any) -> Gateway: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is here; tests of the shared engine come last, so that no other engine runs beside it."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    ours = sorted((items[place] for place in places), key=_shares_the_engine)
    for place, item in zip(places, ours, strict=True):
        items[place] = item
        item.add_marker(pytest.mark.engine)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(START_S + 60))  # the first test waits for the engine


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Called by pytest for each test here."""
    standstill.run(item, nextitem)
    return True


def _shares_the_engine(item: pytest.Item) -> bool:
    return "vllm" in getattr(item, "fixturenames", ())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what was noted, by tests that passed too."""
    lines = [
        f"{report.nodeid.partition('::')[2]}: {text}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, text in report.user_properties
        if name == NOTED
    ]
    if lines:
        terminalreporter.section("noted on the real engine")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Note something for the summary."""
    return lambda what, value: record_property(NOTED, f"{what}: {value}")


@pytest.fixture
def measure(note: Note) -> Measure:
    """Note a time in seconds for the summary."""
    return lambda what, seconds: note(what, f"{seconds * 1000:.0f} ms")


@pytest.fixture(scope="package")
def vllm() -> Iterator[Vllm]:
    """The engine, with a random model."""
    with Vllm(tiny_model()) as engine:
        yield engine


@pytest.fixture(scope="package")
def gateways(vllm: Vllm) -> Iterator[dict[str, Gateway]]:
    """Those that run, by their settings; they end before the engine does."""
    running: dict[str, Gateway] = {}
    yield running
    for gate in running.values():
        gate.close()


@pytest.fixture
def gateway(vllm: Vllm, gateways: dict[str, Gateway]) -> Iterator[Start]:
    """Start (or reuse) a gateway; after the test its gauges must be back at 0 and the engine idle.

    `fresh` gives one without a history, which ends with the test.
    """
    used: list[Gateway] = []
    own: list[Gateway] = []

    def get(*, fresh: bool = False, **settings: Any) -> Gateway:
        assert vllm.running, f"the engine is gone; its output ended with:\n{vllm.log[-5000:]}"
        key = repr(sorted(settings.items()))
        gate = None if fresh else gateways.get(key)
        if gate is None or not gate.running:
            gate = Gateway(None, engine_url=vllm.url, **{"max_in_flight": SLOTS, **settings})
            if fresh:
                own.append(gate)
            else:
                gateways[key] = gate
        used.append(gate)
        return gate

    try:
        yield get
        for gate in used:
            assert gate.running, f"the gateway ended with {gate.exit_code()}; its output:\n{gate.log}"
            gate.quiet()
            assert "Traceback" not in gate.log, gate.log
        wait_until(lambda: load(vllm.metrics()) == (0, 0), "an idle engine")
        assert vllm.running, vllm.log[-5000:]
    finally:
        for gate in own:
            gate.close()


@pytest.fixture(scope="package")
def letters(vllm: Vllm) -> list[int]:
    """The tokens of single characters and of the end.

    Held to a grammar, a random model would fill the permitted white space for ever: these hold only one kind of it,
    which it leaves soon.
    """
    return [vllm.token(chr(code)) for code in range(32, 127)] + [vllm.token("<|im_end|>")]
