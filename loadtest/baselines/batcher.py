"""Batches made by hand: a bounded queue, a future for each request, and one worker. No model, no HTTP."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

BATCH: Final = 16
GATHER_S: Final = 0.05  # from the first request of a batch
QUEUE: Final = 200
WAIT_S: Final = 30.0


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclass(slots=True)
class Waiting(Generic[Item, Answer]):
    """A request in the queue; its future is done when its batch is, or cancelled when nobody waits any more."""

    item: Item
    since: float
    future: "asyncio.Future[Answer]"


@dataclass(slots=True)
class Statistics:
    """What the batches were like so far."""

    batches: int = 0
    batched: int = 0
    largest: int = 0
    refused: int = 0
    timed_out: int = 0
    by_queue: dict[str, int] = field(default_factory=dict)

    def count(self, queue: str, size: int) -> None:
        """Take a batch in."""
        self.batches += 1
        self.batched += size
        self.largest = max(self.largest, size)
        self.by_queue[queue] = self.by_queue.get(queue, 0) + 1


class Batcher(Generic[Item, Answer]):
    """Up to `batch` requests of one queue at a time, or fewer once the first of them has waited `gather_s`.

    `queue_of` names a request's queue: what is alike shares a batch. The queue whose first request came first is next.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
        queue_of: Callable[[Item], str],
        *,
        batch: int = BATCH,
        gather_s: float = GATHER_S,
        limit: int = QUEUE,
        wait_s: float = WAIT_S,
    ) -> None:
        self._run = run
        self._queue_of = queue_of
        self._batch = batch
        self._gather_s = gather_s
        self._limit = limit
        self._wait_s = wait_s
        self._queues: dict[str, deque[Waiting[Item, Answer]]] = {}
        self._came = asyncio.Event()
        self.running = 0
        self.statistics = Statistics()

    @property
    def depth(self) -> int:
        """Requests that wait and are still wanted."""
        return sum(not waiting.future.done() for queue in self._queues.values() for waiting in queue)

    async def ask(self, item: Item) -> Answer:
        """Queue a request and wait for its answer.

        Raises:
            QueueFull: at once.
            TimeoutError: it took longer than `wait_s`, queue and batch together; a batch that has begun goes on.
        """
        if self.depth >= self._limit:
            self.statistics.refused += 1
            raise QueueFull
        loop = asyncio.get_running_loop()
        waiting = Waiting[Item, Answer](item, loop.time(), loop.create_future())
        self._queues.setdefault(self._queue_of(item), deque()).append(waiting)
        self._came.set()
        try:
            return await asyncio.wait_for(waiting.future, self._wait_s)
        except TimeoutError:
            self.statistics.timed_out += 1
            raise

    async def work(self) -> None:
        """Make batches until cancelled. Whatever a batch fails with, its requests get, and the next one follows."""
        while True:
            name = self._next_queue()
            if name is None:
                self._came.clear()
                await self._came.wait()
                continue
            await self._gather(name)
            batch = self._take(name)
            if not batch:
                continue
            self.statistics.count(name, len(batch))
            self.running = len(batch)
            try:
                answers = await self._run([waiting.item for waiting in batch])
                for waiting, answer in zip(batch, answers, strict=True):
                    if not waiting.future.done():
                        waiting.future.set_result(answer)
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
                for waiting in batch:
                    if not waiting.future.done():
                        waiting.future.set_exception(error)
            finally:
                self.running = 0

    def _next_queue(self) -> str | None:
        """The queue whose first request has waited longest; drops those whose askers are gone."""
        for queue in self._queues.values():
            while queue and queue[0].future.done():
                queue.popleft()
        filled = {name: queue[0].since for name, queue in self._queues.items() if queue}
        return min(filled, key=filled.__getitem__) if filled else None

    async def _gather(self, name: str) -> None:
        """Wait until a whole batch is there, or the time of its first request is over."""
        loop, queue = asyncio.get_running_loop(), self._queues[name]
        end = queue[0].since + self._gather_s
        while len(queue) < self._batch and (left := end - loop.time()) > 0:
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), left)

    def _take(self, name: str) -> list[Waiting[Item, Answer]]:
        queue, batch = self._queues[name], list[Waiting[Item, Answer]]()
        while queue and len(batch) < self._batch:
            waiting = queue.popleft()
            if not waiting.future.done():
                batch.append(waiting)
        return batch
