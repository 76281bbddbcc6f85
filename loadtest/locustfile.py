"""Users of a running server, for locust: short and long calls, conversations, people who leave, retries like an SDK's.

    python -m locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 -u 30 -t 60s --shape spike

Rows: `chat` is a whole call; `first token`, `between tokens` (mean of a call) and `longest gap` are parts of it;
`refused` are answers that shed load, which are no failures; `left` are users who went away. A stream without its end
mark is a failure. Exit code 1 when a promise (`--slo-…`) was not kept. Closed loop: users wait for their answers, so
under overload fewer come. For what an overload does, see `python -m loadtest.overload`.
"""

import json
import random
import sys
import time
from typing import Any, Final

import gevent
import requests
from locust import LoadTestShape, User, between, events, task

from loadtest import shapes
from loadtest.outcomes import Outcome
from loadtest.retries import pause
from loadtest.slo import Slo, Tally, broken, doubts, summary
from loadtest.streaming import Call, Seen
from loadtest.workload import WORDS

CHAT: Final = "/v1/chat/completions"
LIMIT_S: Final = 120.0  # for one attempt
IMPATIENT_S: Final = (0.2, 2.0)
TURNS: Final = 4  # after so many answers a conversation starts anew
LAG_EVERY_S: Final = 0.1
LIST_S: Final = 10.0  # for the list of models

tally = Tally()


@events.init_command_line_parser.add_listener
def options(parser: Any) -> None:
    """What can be said beyond locust's own flags."""
    add = parser.add_argument
    add("--shape", choices=list(shapes.SHAPES), default="ramp", help="users over time (-u is the peak, -t the length)")
    add("--model", default="", help="the name to ask for (default: the first of /v1/models)")
    add("--api-key", default="", env_var="LOADTEST_API_KEY", is_secret=True, help="sent as a bearer token")
    add("--impatient", type=float, default=0.05, help="share of calls whose user leaves after a moment")
    add("--seed", type=int, default=1, help="of what users do")
    add("--slo-first-ms", type=float, default=2000.0, help="p99 of the first token of short calls")
    add("--slo-failed", type=float, default=0.0, help="share of calls that may fail")
    add("--slo-refused", type=float, default=1.0, help="share of calls that may be refused to the end")


class Shape(LoadTestShape):
    """The shape that `--shape` names."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner
        given = self.runner.environment.parsed_options
        now = shapes.users(given.shape, given.num_users or 10, self.get_run_time(), given.run_time or 60)
        return None if now is None else (now, max(1.0, given.num_users or 10))


class Person(User):
    """Somebody who asks, reads, and asks again."""

    wait_time = between(0.5, 2.0)
    born = 0

    def on_start(self) -> None:
        Person.born += 1
        self.given = self.environment.parsed_options
        self.random = random.Random(f"{self.given.seed} {Person.born}")
        self.history: list[dict[str, str]] = []

    @task(10)
    def short(self) -> None:
        self.ask("short", [self.say(24)], self.random.randint(8, 32))

    @task(3)
    def long(self) -> None:
        self.ask("long", [self.say(self.random.randint(300, 600))], self.random.randint(128, 256))

    @task(5)
    def conversation(self) -> None:
        """Each turn sends all that was said before."""
        self.history.append(self.say(16))
        seen = self.ask("conversation", self.history, 48)
        if seen is not None:
            self.history.append({"role": "assistant", "content": seen.text()})
        if seen is None or len(self.history) >= 2 * TURNS:
            self.history = []

    def say(self, words: int) -> dict[str, str]:
        return {"role": "user", "content": " ".join(self.random.choices(WORDS, k=words))}

    def ask(self, name: str, messages: list[dict[str, str]], tokens: int) -> Seen | None:
        """A call with its retries; the answer if it came whole."""
        asked = {"model": self.given.model, "messages": messages, "max_tokens": tokens, "stream": True}
        body = json.dumps(asked).encode()
        headers = {"authorization": f"Bearer {self.given.api_key}"} if self.given.api_key else {}
        leave_s = self.random.uniform(*IMPATIENT_S) if self.random.random() < self.given.impatient else LIMIT_S
        tally.started += 1
        attempt = 0
        while True:
            sent = headers | {"x-stainless-retry-count": str(attempt)}
            seen = Call(tokens).run(self.host, CHAT, sent, body, leave_s, LIMIT_S)
            tally.attempts += 1
            self.note(name, seen)
            refused = seen.record.outcome is Outcome.REFUSED
            again = None
            if refused or seen.failure:
                again = pause(seen.record.status, seen.headers, attempt, self.random.random())
            if again is None:
                break
            gevent.sleep(again)
            attempt += 1
        if seen.left:
            tally.left += 1
        elif seen.failure:
            tally.failed += 1
        elif refused:
            tally.gave_up += 1
        else:
            tally.whole += 1
            return seen
        return None

    def note(self, name: str, seen: Seen) -> None:
        """An attempt in locust's rows."""
        record = seen.record
        took = record.end or 0.0
        if record.outcome is Outcome.REFUSED:
            tally.refusals += 1
            self.row("refused", record.reason or str(record.status), took)
        elif seen.left:
            self.row("left", name, took)
        elif seen.failure:
            self.row("chat", name, took, RuntimeError(seen.failure))
        else:
            self.row("chat", name, took, size=len(seen.body))
            self.row("longest gap", name, seen.longest_gap)
            if seen.between_s is not None:
                self.row("between tokens", name, seen.between_s)
        if record.first is not None:
            self.row("first token", name, record.first)
            if name == "short":
                tally.first_s.append(record.first)

    def row(self, kind: str, name: str, took: float, error: Exception | None = None, size: int = 0) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=took * 1000,
            response_length=size,
            exception=error,
            context={},
        )


@events.init.add_listener
def prepare(environment: Any, **_: Any) -> None:
    """Find the model's name, before anything starts."""
    given = environment.parsed_options
    if not given.model:
        given.model = first_model(environment.host or "", given.api_key)


@events.test_start.add_listener
def start(environment: Any, **_: Any) -> None:
    """Watch this process."""
    environment.cpu_before = (time.monotonic(), time.process_time())
    environment.watch = gevent.spawn(watch)


def first_model(host: str, key: str) -> str:
    """The first name that the server lists; ends the program with code 2 if it lists none."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        listed = requests.get(f"{host}/v1/models", headers=headers, timeout=LIST_S).json()
        return str(listed["data"][0]["id"])
    except (requests.RequestException, ValueError, KeyError, IndexError) as error:
        print(f"loadtest: no model at {host}/v1/models ({error}). Does the server run? (make serve)", file=sys.stderr)
        raise SystemExit(2) from error


def watch() -> None:
    """By how much timers are late: the share of the client in what it measures."""
    while True:
        due = time.monotonic() + LAG_EVERY_S
        gevent.sleep(LAG_EVERY_S)
        tally.lag_s.append(max(0.0, time.monotonic() - due))


@events.quitting.add_listener
def judge(environment: Any, **_: Any) -> None:
    """The exit code by the promises, and a warning if this process was the bottleneck."""
    given = environment.parsed_options
    began, spent = getattr(environment, "cpu_before", (time.monotonic(), time.process_time()))
    share = (time.process_time() - spent) / max(1e-9, time.monotonic() - began)
    print(f"\n{summary(tally)}", file=sys.stderr)
    for doubt in doubts(tally, share):
        print(f"WARNING: the client itself was saturated, {doubt}: the figures are its own", file=sys.stderr)
    slo = Slo(given.slo_first_ms / 1000, given.slo_failed, given.slo_refused)
    not_kept = broken(slo, tally)
    for promise in not_kept:
        print(f"SLO not kept: {promise}", file=sys.stderr)
    environment.process_exit_code = 1 if not_kept else 0
