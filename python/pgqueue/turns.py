"""Whose turn it is: queues by weight, and when there is no point in asking any."""

import time
from collections.abc import Mapping

ASK_AGAIN = 0.1  # seconds after which an empty queue is asked again beside a full one


class Turns:
    """Several queues, each with a weight; a full one cannot starve another."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self.names = list(weights)
        self.quiet_until = 0.0  # by the monotonic clock; no queue has anything before
        self.changes = 0
        self._weights = dict(weights)
        self._credit = dict.fromkeys(weights, 0)
        self._empty_until = dict.fromkeys(weights, 0.0)

    @property
    def is_settled(self) -> bool:
        """Whether all queues were asked, had no more, and nothing was heard since."""
        return time.monotonic() < self.quiet_until

    def refresh(self) -> None:
        """Forget what was found empty: something has changed."""
        self.quiet_until = 0.0
        self.changes += 1

    def settle(self, seconds: float, changes: int) -> None:
        """Ask none of them for so long, unless something has changed since."""
        if changes == self.changes:
            self.quiet_until = time.monotonic() + seconds

    def found_empty(self, name: str) -> None:
        """Pass one over for a little while."""
        self._empty_until[name] = time.monotonic() + ASK_AGAIN

    def next(self) -> str | None:
        """Name the queue to claim from; None if all of them were empty a moment ago.

        Smooth weighted round robin: each gains its weight, the richest pays for all.
        """
        now = time.monotonic()
        if now < self.quiet_until:
            return None
        ready = [name for name in self.names if self._empty_until[name] <= now]
        return self._elect(ready) if ready else None

    def in_turn(self) -> list[str]:
        """Name all, in the order of this turn, the elected one first."""
        first = self._elect(self.names)
        return [first, *(name for name in self.names if name != first)]

    def _elect(self, names: list[str]) -> str:
        for name in names:
            self._credit[name] += self._weights[name]
        first = max(names, key=self._credit.__getitem__)
        self._credit[first] -= sum(self._weights[name] for name in names)
        return first
