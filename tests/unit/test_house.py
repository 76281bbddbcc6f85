"""Bounds on who is in the house and on the bytes held for them, and that both come back to zero."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app.errors import DRAINING, QUEUE_FULL, TOO_LARGE, Kind, Refused
from app.house import Guest, House


def house(guests: int = 2, body: int = 100, held: int = 150) -> House:
    return House(max_guests=guests, max_body_bytes=body, max_held_bytes=held)


def soon() -> int:
    return 1


def refusal(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


def test_a_full_house_refuses_and_says_when_to_come_back() -> None:
    full = house()
    guests = [full.enter(0, soon), full.enter(0, soon)]
    refused = refusal(lambda: full.enter(0, retry_after_s=lambda: 7))
    assert (refused.kind, refused.retry_after_s) == (QUEUE_FULL, 7)
    guests[0].leave()
    full.enter(0, soon)
    assert full.guests == 2


def test_a_full_house_lets_a_client_in_for_whom_another_gives_way() -> None:
    full, asked = house(guests=3), list[int]()
    guests = [full.enter(0, soon, key) for key in "ggp"]

    def displace(count: int) -> bool:
        asked.append(count)
        guests[1].leave()
        return True

    full.enter(0, soon, "p", displace)
    assert (asked, full.guests) == ([2], 3)
    guests[1].leave()
    assert full.guests == 3
    assert refusal(lambda: full.enter(0, soon, "p", lambda _: False)).kind is QUEUE_FULL


def test_a_client_that_has_left_no_longer_counts_for_its_key() -> None:
    """Else nobody would give way to a key any more once it had been there long enough."""
    full, asked = house(guests=1), list[int]()
    for _ in range(3):
        full.enter(0, soon, "p").leave()
    full.enter(0, soon, "g")

    def displace(count: int) -> bool:
        asked.append(count)
        return False

    assert refusal(lambda: full.enter(0, soon, "p", displace)).kind is QUEUE_FULL
    assert asked == [1]


def test_nobody_gives_way_to_a_client_whose_body_finds_no_room() -> None:
    """With a header alone any key could have emptied the queue of all others."""
    full = house(guests=2)
    waiting = [full.enter(75, soon, "g") for _ in range(2)]

    def displace(_: int) -> bool:
        waiting.pop().leave()
        return True

    assert refusal(lambda: full.enter(100, soon, "p", displace)).kind is QUEUE_FULL
    assert (len(waiting), full.guests) == (2, 2)


@pytest.mark.parametrize(("size", "kind"), [(100, None), (101, TOO_LARGE), (10**30, TOO_LARGE)])
def test_a_declared_body_is_measured_before_it_is_read(size: int, kind: Kind | None) -> None:
    rooms = house()
    if kind is None:
        rooms.enter(size, soon)
        rooms.visit(50)
    else:
        assert refusal(lambda: rooms.enter(size, soon)).kind is kind
        assert refusal(lambda: rooms.visit(size)).kind is kind
        assert (rooms.guests, rooms.held_bytes) == (0, 0)


def test_a_body_that_is_too_large_is_told_so_even_by_a_full_house() -> None:
    rooms = house(guests=0)
    assert refusal(lambda: rooms.enter(101, soon)).kind is TOO_LARGE
    assert refusal(lambda: rooms.enter(100, soon)).kind is QUEUE_FULL


def test_all_bodies_together_are_bounded_too() -> None:
    rooms = house()
    rooms.enter(100, soon)
    refused = refusal(lambda: rooms.enter(51, retry_after_s=lambda: 9))
    assert (refused.kind, refused.retry_after_s) == (QUEUE_FULL, 9)
    assert refusal(lambda: rooms.visit(51)).kind is QUEUE_FULL
    rooms.enter(50, soon)
    assert (rooms.guests, rooms.held_bytes) == (2, 150)


def test_a_body_for_which_there_is_never_room_is_not_told_to_come_back() -> None:
    rooms = house(body=100, held=50)
    assert refusal(lambda: rooms.enter(51, soon)).kind is TOO_LARGE
    rooms.enter(50, soon)


def test_a_chunked_body_counts_as_it_grows() -> None:
    rooms = house()
    guest, other = rooms.enter(0, soon), rooms.enter(90, soon)
    guest.hold(60)
    assert refusal(lambda: guest.hold(61)).kind is QUEUE_FULL
    other.let_go()
    guest.hold(100)
    assert refusal(lambda: guest.hold(101)).kind is TOO_LARGE
    guest.leave()
    assert (rooms.guests, rooms.held_bytes) == (1, 0)


def test_a_body_that_the_engine_has_makes_room_while_its_request_stays() -> None:
    rooms = house()
    guest = rooms.enter(100, soon)
    guest.let_go()
    guest.let_go()
    assert (rooms.guests, rooms.held_bytes) == (1, 0)


def test_leaving_twice_frees_one_place() -> None:
    rooms = house()
    guest, _ = rooms.enter(10, soon), rooms.enter(10, soon)
    guest.leave()
    guest.leave()
    assert (rooms.guests, rooms.held_bytes) == (1, 10)


def test_a_visitor_takes_no_place() -> None:
    rooms = house(guests=0)
    visitor = rooms.visit(10)
    assert (rooms.guests, rooms.held_bytes) == (0, 10)
    visitor.leave()
    assert (rooms.guests, rooms.held_bytes) == (0, 0)


def test_a_draining_house_is_closed() -> None:
    rooms = house()
    rooms.check_open()
    rooms.draining = True
    assert refusal(rooms.check_open).kind is DRAINING


class Visits(RuleBasedStateMachine):
    """Anything that guests may do, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.house = house(guests=3)
        self.inside: dict[Guest, int] = {}
        self.gone: list[Guest] = []

    @rule(size=st.integers(0, 120), visitor=st.booleans())
    def arrive(self, size: int, visitor: bool) -> None:
        try:
            guest = self.house.visit(size) if visitor else self.house.enter(size, soon)
        except Refused:
            return
        self.inside[guest] = size

    @rule(data=st.data(), size=st.integers(0, 120))
    def grow(self, data: st.DataObject, size: int) -> None:
        if self.inside:
            guest = data.draw(st.sampled_from(list(self.inside)))
            try:
                guest.hold(size)
            except Refused:
                return
            self.inside[guest] = size

    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        if self.inside:
            guest = data.draw(st.sampled_from(list(self.inside)))
            guest.let_go()
            self.inside[guest] = 0

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.inside or self.gone:
            guest = data.draw(st.sampled_from([*self.inside, *self.gone]))
            guest.leave()
            self.inside.pop(guest, None)
            self.gone.append(guest)

    @invariant()
    def bounds_hold_and_bytes_add_up(self) -> None:
        assert 0 <= self.house.guests <= 3
        assert self.house.held_bytes == sum(self.inside.values()) <= 150

    def teardown(self) -> None:
        for guest in self.inside:
            guest.leave()
        assert (self.house.guests, self.house.held_bytes) == (0, 0)


TestVisits = Visits.TestCase
TestVisits.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
