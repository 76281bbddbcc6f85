"""The engine steps back behind the other processes of the machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.niceness import give_way


@pytest.fixture
def leader() -> Iterator[int]:
    """A process that leads a session and does nothing."""
    process = subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    yield process.pid
    process.communicate(b"\n")


def test_both_the_process_and_its_session_step_back(leader: int) -> None:
    give_way(leader, 7)
    assert os.getpriority(os.PRIO_PROCESS, leader) == 7
    group = Path(f"/proc/{leader}/autogroup")
    if not group.exists():
        pytest.skip("this kernel has no automatic task groups")
    assert group.read_text().split()[1:] == ["nice", "7"]


def test_none_is_asked_for_where_the_engine_has_a_gpu(leader: int) -> None:
    give_way(leader, 0)
    assert os.getpriority(os.PRIO_PROCESS, leader) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_kernel_without_task_groups_is_no_error(leader: int, tmp_path: Path) -> None:
    give_way(leader, 3, proc=tmp_path)
    assert os.getpriority(os.PRIO_PROCESS, leader) == 3


def test_a_process_that_has_ended_is_no_error() -> None:
    give_way(2**22 + 1, 3)
