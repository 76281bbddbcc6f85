"""What the fake engine knows: its log, its slots, its counters and the state that `/fake/set` changes."""

import asyncio
import heapq
import itertools
import os
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.fake_engine.script import Script, ScriptError

BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True, eq=False)
class Record:
    """One request in the log; times are seconds since the engine's start, None for what didn't happen."""

    id: int
    connection: int
    method: str
    target: str
    headers: list[tuple[str, str]]
    received: float
    tag: str = ""
    body_bytes: int = 0
    body_sha256: str = ""
    priority: int | None = None  # of the X-Vllm-Priority header
    queued: float | None = None
    started: float | None = None
    first: float | None = None
    ended: float | None = None
    events: int = 0  # tokens sent
    sent_bytes: int = 0  # handed to the socket
    outcome: str = "received"  # queued, running, then finished, aborted or faulted
    prompt_tokens: int = 0
    prefill_s: float = 0


@dataclass(slots=True)
class Server:
    """What `/fake/set` changes."""

    health_status: int = 200
    health_ms: float = 0
    metrics_status: int = 200
    metrics_ms: float = 0
    metrics_frozen: bool = False  # show for ever what they said when this was set
    hang: bool = False  # no work goes on and the metrics stand still, though /health answers
    accept: str = "normal"  # new connections: close or reset them, or hang (accept and never read)
    max_num_seqs: int = 0  # slots; 0: no limit
    start_time: float = field(default_factory=time.time)  # process_start_time_seconds


class Engine:
    """The state shared by all connections."""

    def __init__(self, *, model: str, max_num_seqs: int, kv_tokens: int, log_size: int, defaults: Script) -> None:
        self.model = model
        self.kv_tokens = kv_tokens
        self.born = time.monotonic()
        self.first_defaults = self.defaults = defaults
        self.first_server = Server(max_num_seqs=max_num_seqs)
        self.server = Server(max_num_seqs=max_num_seqs)
        self.log: deque[Record] = deque(maxlen=log_size)
        self.ids = itertools.count(1)
        self.running: dict[int, Record] = {}
        self.waiting: list[tuple[int, int, asyncio.Future[None], Record]] = []
        self.counts: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.open_connections = 0
        self.going = asyncio.Event()
        self.going.set()
        # vLLM's counters, which a reset leaves alone, as its clients expect counters only to grow
        self.generation_tokens = 0
        self.prompt_tokens = 0
        self.steps = 0.0
        self.step_tokens = 0
        self.prefix_queries = 0
        self.success = 0
        self._frozen: bytes | None = None

    def now(self) -> float:
        """Seconds since the start, to a tenth of a millisecond."""
        return round(time.monotonic() - self.born, 4)

    # The life of a request

    def receive(self, record: Record) -> None:
        """A request's head is in."""
        self.log.append(record)
        self.counts["received"] += 1

    async def acquire(self, record: Record) -> None:
        """Wait for a slot, the lowest priority number first, then the earliest, as vLLM does."""
        if self._full():
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            record.outcome, record.queued = "queued", self.now()
            heapq.heappush(self.waiting, (record.priority or 0, record.id, place, record))
            await place
        else:
            self._start(record)

    def _full(self) -> bool:
        return bool(self.server.max_num_seqs) and len(self.running) >= self.server.max_num_seqs

    def _start(self, record: Record) -> None:
        record.outcome, record.started = "running", self.now()
        self.running[record.id] = record
        self.counts["started"] += 1
        self.counts["max_running"] = max(self.counts["max_running"], len(self.running))
        self.prefix_queries += record.prompt_tokens

    def fill(self) -> None:
        """Give free slots to those that wait."""
        while self.waiting and not self._full():
            _, _, place, record = heapq.heappop(self.waiting)
            if not place.done():
                place.set_result(None)
                self._start(record)

    def token(self, record: Record, count: int = 1) -> None:
        """Account for `count` tokens sent."""
        if record.first is None:
            record.first = self.now()
            self.prompt_tokens += record.prompt_tokens
            self.step_tokens += record.prompt_tokens
        record.events += count
        self.generation_tokens += count
        self.step_tokens += count
        self.steps += count / (len(self.running) or 1)

    def end(self, record: Record, outcome: str) -> None:
        """A request is over; only the first word counts."""
        if record.ended is not None:
            return
        record.ended, record.outcome = self.now(), outcome
        self.counts[outcome] += 1
        if outcome == "finished" and record.started is not None:
            self.success += 1
        self.running.pop(record.id, None)
        self.fill()

    # What `/fake/` says and does

    def report(self) -> dict[str, Any]:
        """The body of `/fake/counts`."""
        names = ("received", "started", "finished", "aborted", "faulted", "max_running", "connections", "malformed")
        return {name: self.counts[name] for name in names} | {
            "queued": sum(not place.done() for _, _, place, _ in self.waiting),
            "running": len(self.running),
            "open_connections": self.open_connections,
            "paths": dict(self.paths),
        }

    def entries(self, tag: str | None) -> list[dict[str, Any]]:
        """The body of `/fake/log`."""
        return [asdict(record) for record in self.log if tag is None or record.tag == tag]

    def change(self, given: dict[str, Any]) -> None:
        """`/fake/set`.

        Raises:
            ScriptError: an unknown name.
        """
        for name, value in given.items():
            if name not in Server.__dataclass_fields__:
                raise ScriptError(f"unknown name {name!r}; known: {', '.join(Server.__dataclass_fields__)}")
            setattr(self.server, name, value)
        self._apply()

    def reset(self) -> None:
        """`/fake/reset`, less the cutting of open work: the connections do that."""
        self.defaults = self.first_defaults
        self.server = Server(**(asdict(self.first_server) | {"start_time": self.server.start_time}))
        self.log.clear()
        self.counts.clear()
        self.paths.clear()
        self._apply()

    def _apply(self) -> None:
        self.going.set()
        if self.server.metrics_frozen or self.server.hang:
            self._frozen = self._frozen or self._metrics()
        else:
            self._frozen = None
        if self.server.hang:
            self.going.clear()
        self.fill()

    # Metrics

    def metrics(self) -> bytes:
        """The text of `/metrics`."""
        return self._frozen or self._metrics()

    def _kv_usage(self) -> float:
        tokens = 0.0
        now = self.now()
        for record in self.running.values():
            done = 1.0
            if record.first is None and record.prefill_s and record.started is not None:
                done = min(1.0, (now - record.started) / record.prefill_s)
            tokens += record.prompt_tokens * done + record.events
        return min(1.0, tokens / self.kv_tokens)

    def _metrics(self) -> bytes:
        labels = f'engine="0",model_name="{self.model}"'
        lines: list[str] = []

        def family(name: str, kind: str, help_line: str, *samples: tuple[str, str, float]) -> None:
            lines.append(f"# HELP {name} {help_line}")
            lines.append(f"# TYPE {name} {kind}")
            lines.extend(
                f"{name}{suffix}{{{labels}{more}}} {float(value)}" if name.startswith("vllm:") else f"{name} {value}"
                for suffix, more, value in samples
            )

        def counter(name: str, help_line: str, value: float, more: str = "") -> None:
            family(name, "counter", help_line, ("", more, value))

        family("python_info", "gauge", "Python platform information.", ("", "", 1.0))
        family("process_start_time_seconds", "gauge", "Start time of the process.", ("", "", self.server.start_time))
        family("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", ("", "", 1e9))
        queued = sum(not place.done() for _, _, place, _ in self.waiting)
        family(
            "vllm:num_requests_running", "gauge", "Requests in model execution batches.", ("", "", len(self.running))
        )
        family("vllm:num_requests_waiting", "gauge", "Requests waiting to be processed.", ("", "", queued))
        family("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage, 1 is 100 percent.", ("", "", self._kv_usage()))
        counter("vllm:prefix_cache_queries_total", "Prefix cache queries, in tokens.", self.prefix_queries)
        counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in tokens.", 0)
        counter("vllm:num_preemptions_total", "Cumulative number of preemptions.", 0)
        counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", self.prompt_tokens)
        counter("vllm:generation_tokens_total", "Number of generation tokens processed.", self.generation_tokens)
        counter("vllm:request_success_total", "Requests processed.", self.success, ',finished_reason="stop"')
        steps = int(self.steps)
        mean = self.step_tokens / steps if steps else 0
        samples = [("_bucket", f',le="{float(le)}"', steps if mean <= le else 0) for le in BUCKETS]
        samples += [("_bucket", ',le="+Inf"', steps), ("_count", "", steps), ("_sum", "", self.step_tokens)]
        family("vllm:iteration_tokens_total", "histogram", "Number of tokens per engine step.", *samples)
        lines.append("# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig")
        lines.append("# TYPE vllm:cache_config_info gauge")
        blocks = f'block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="{self.kv_tokens // 16}"'
        lines.append(f"vllm:cache_config_info{{{blocks}}} 1.0")
        lines.append("# HELP http_requests_total Total number of requests by method, status and handler.")
        lines.append("# TYPE http_requests_total counter")
        lines.append(f'http_requests_total{{handler="none",method="POST",status="2xx"}} {float(self.success)}')
        return ("\n".join(lines) + "\n").encode()


def exit_now(code: int) -> None:
    """End the process without a word to anybody, as a crash does."""
    os._exit(code)
