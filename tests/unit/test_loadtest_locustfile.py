"""The locust file itself, each time in a process of its own, for importing locust changes Python's sockets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, free_port

pytestmark = pytest.mark.slow  # `make fast` installs no locust

SATURATED = """
import time, gevent
from locust import events
from loadtest.locustfile import *

def hog():
    while True:
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            pass
        gevent.sleep(0.01)

@events.test_start.add_listener
def begin(environment, **_):
    gevent.spawn(hog)
"""

TALK = """
import locust  # first: it changes sockets before anybody uses them
import json, random
from types import SimpleNamespace
from loadtest.locustfile import Person

person, asked, answers = Person.__new__(Person), [], iter([True] * 6 + [False, True])
person.random, person.history = random.Random(1), []

def ask(name, messages, tokens):
    asked.append([message["role"] for message in messages])
    return SimpleNamespace(text=lambda: "so") if next(answers) else None

person.ask = ask
for _ in range(8):
    person.conversation()
print(json.dumps(asked))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=50)


def test_a_client_that_is_saturated_itself_warns_of_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "saturated.py"
    file.write_text(SATURATED)
    nobody = f"http://127.0.0.1:{free_port()}"
    flags = ["--headless", "--only-summary", "--host", nobody, "--model", "m", "--shape", "soak"]
    ended = run("-m", "locust", "-f", str(file), *flags, "-u", "1", "-t", "3s", "--stop-timeout", "1")
    assert "WARNING: the client itself was saturated, its timers were late by" in ended.stderr, ended.stderr


def test_a_conversation_repeats_itself_for_four_turns_and_begins_anew_then_or_after_a_failure() -> None:
    ended = run("-c", TALK)
    assert ended.returncode == 0, ended.stderr
    asked = json.loads(ended.stdout)
    assert [len(messages) for messages in asked] == [1, 3, 5, 7, 1, 3, 5, 1]
    assert asked[3] == ["user", "assistant"] * 3 + ["user"]
