"""The house: everyone uploading, queued or running, and the bytes of their bodies. Counted before any body is read."""

from collections import Counter
from collections.abc import Callable

from app.errors import DRAINING, QUEUE_FULL, TOO_LARGE, Refused


class Guest:
    """One request's place in the house and the bytes held for it."""

    __slots__ = ("_held", "_house", "_inside", "_on_leave")

    def __init__(self, house: "House", held: int, on_leave: Callable[[], None]) -> None:
        self._house = house
        self._held = held
        self._on_leave = on_leave
        self._inside = True

    def hold(self, held: int) -> None:
        """Set how many bytes are held for this request.

        Raises:
            Refused: `request_too_large`, or `queue_full` when the house holds too many bytes.
        """
        self._house.check_bytes(held, already=self._held)
        self._house.held_bytes += held - self._held
        self._held = held

    def let_go(self) -> None:
        """The engine has the body."""
        self._house.held_bytes -= self._held
        self._held = 0

    def leave(self) -> None:
        """Give the place back; a second call does nothing."""
        if self._inside:
            self._inside = False
            self.let_go()
            self._on_leave()


class House:
    """Bounds on requests and bytes; every method is synchronous, so count and check are one step."""

    def __init__(self, max_guests: int, max_body_bytes: int, max_held_bytes: int) -> None:
        self.max_guests = max_guests
        self.max_body_bytes = min(max_body_bytes, max_held_bytes)  # a larger one could never come in
        self.max_held_bytes = max_held_bytes
        self.guests = 0
        self._by_key: Counter[str] = Counter()
        self.held_bytes = 0
        self.draining = False

    def check_open(self) -> None:
        """Raises: Refused: `draining`."""
        if self.draining:
            raise Refused(DRAINING, "The server is shutting down; send the request to another one.")

    def enter(
        self,
        content_length: int,
        retry_after_s: Callable[[], int],
        key: str = "",
        displace: Callable[[int], bool] = lambda _: False,
    ) -> Guest:
        """Take a place; `content_length` is 0 for a body that comes in chunks. `retry_after_s` is for a refusal.

        When all places are taken, `displace` may free one; it is told how many this key would have with this one.

        Raises:
            Refused: `request_too_large`, or `queue_full` when places or bytes are used up.
        """
        # Before anybody has to go for it: who is refused for its bytes must not cost another its place.
        self.check_bytes(content_length, already=0, retry_after_s=retry_after_s)
        if self.guests >= self.max_guests and not displace(self._by_key[key] + 1):
            message = f"The server is full: {self.guests} requests are in it. Retry later."
            raise Refused(QUEUE_FULL, message, retry_after_s=retry_after_s())
        self.guests += 1
        self._by_key[key] += 1
        self.held_bytes += content_length
        return Guest(self, content_length, lambda: self._left(key))

    def visit(self, content_length: int) -> Guest:
        """Hold bytes without taking a place.

        Raises:
            Refused: `request_too_large`, or `queue_full` when the bytes are used up.
        """
        self.check_bytes(content_length, already=0)
        self.held_bytes += content_length
        return Guest(self, content_length, lambda: None)

    def check_bytes(self, held: int, *, already: int, retry_after_s: Callable[[], int] = lambda: 1) -> None:
        """Raises: Refused: `request_too_large` or `queue_full`."""
        if held > self.max_body_bytes:
            raise Refused(TOO_LARGE, f"The body is larger than the {self.max_body_bytes} bytes allowed here.")
        if self.held_bytes + held - already > self.max_held_bytes:
            message = "The server holds too many request bytes at the moment. Retry later."
            raise Refused(QUEUE_FULL, message, retry_after_s=retry_after_s())

    def _left(self, key: str) -> None:
        self.guests -= 1
        self._by_key[key] -= 1
