"""What a torture has seen: how calls ended, by their clients and by the engine, and every defect."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from loadtest.report import aligned
from loadtest.torture_calls import DEFECTS, Call


@dataclass(slots=True)
class Tally:
    """What has been seen so far."""

    ends: Counter[str] = field(default_factory=Counter)
    by_manner: dict[str, Counter[str]] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    words: dict[str, str] = field(default_factory=dict)  # how each call ended, by its id
    defects: list[str] = field(default_factory=list)
    troubles: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)  # bytes by calls
    most_descriptors: int = 0
    at_engine: Counter[str] = field(default_factory=Counter)  # how requests ended there, over all its lives
    seen_there: Counter[str] = field(default_factory=Counter)  # ids of calls

    def add(self, call: Call, word: str, status: int) -> None:
        """One call is over."""
        self.ends[word] += 1
        self.by_manner.setdefault(call.manner, Counter())[word] += 1
        self.statuses[status] += 1
        self.words[call.id] = word
        if word in DEFECTS:
            self.defects.append(f"{word}: {call} status {status}")

    def add_life(self, entries: Iterable[dict[str, Any]]) -> None:
        """What the engine has to say before it is killed, or at the end."""
        for entry in entries:
            name = dict(entry["headers"]).get("x-request-id", "")
            self.at_engine[entry["outcome"]] += 1
            self.seen_there[name] += 1
            if self.seen_there[name] > 1 and name:
                self.defects.append(f"sent twice: {name}")
            if self.words.get(name) == "refused":
                self.defects.append(f"refused, and sent nevertheless: {name}")
            if self.words.get(name) == "whole" and entry["outcome"] in ("aborted", "faulted"):
                self.defects.append(f"whole for its client, {entry['outcome']} at the engine: {name}")

    @property
    def done(self) -> int:
        return self.ends.total()


def table(by_manner: dict[str, dict[str, int]]) -> str:
    """One line for each manner of client."""
    words = sorted({word for ends in by_manner.values() for word in ends} | set(DEFECTS))
    lines = [["client", *words]]
    lines += [[manner, *(str(ends.get(word, 0)) for word in words)] for manner, ends in sorted(by_manner.items())]
    lines.append(["all", *(str(sum(ends.get(word, 0) for ends in by_manner.values())) for word in words)])
    return aligned(lines)
