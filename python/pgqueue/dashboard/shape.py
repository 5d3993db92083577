"""How numbers, times and texts are written. The template engine escapes all of it."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def number(value: Any) -> str:
    """1,234; fractions with three digits."""
    if value is None:
        return ""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{float(value):.3g}"


def percent(part: float | Decimal | None) -> str:
    return "" if part is None else f"{100 * float(part):.0f} %"


def span(value: timedelta | None) -> str:
    """A duration by its two largest units."""
    if value is None:
        return ""
    if value < timedelta():
        return "−" + span(-value)
    seconds = value.total_seconds()
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds else "0 s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    parts = []
    for unit, size in UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def seconds(value: timedelta) -> float:
    return value.total_seconds()


def since(moment: datetime, now: datetime) -> str:
    if moment > now:
        return "in " + span(moment - now)
    return span(now - moment) + " ago"


def exact(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def as_json(value: Any) -> str:
    """For a hidden field: a browser would change the ends of lines in a bare text."""
    return json.dumps(value)


def digest(value: Any) -> str:
    """For the id of a row whose name is long."""
    return hashlib.sha256(as_json(value).encode()).hexdigest()[:16]


def outline(
    ago: Iterable[int],
    values: Sequence[Any],
    height: int,
    most: Any = None,
    slots: int = 60,
) -> str:
    """The path around the value of each of the last slots, the current one at the right.

    Each is one wide. Any value above zero is visible.
    """
    most = max(values, default=0) if most is None else most
    heights = [0] * slots
    for before, value in zip(ago, values, strict=True):
        if value:
            heights[slots - 1 - min(slots - 1, max(0, before))] = max(
                1, round(height * float(value / most))
            )
    steps, last = [f"M0 {height}"], 0
    for tall, alike in itertools.groupby(heights):
        steps.append(f"v{last - tall}h{len(list(alike))}")
        last = tall
    return "".join(steps) + f"V{height}z"


FILTERS = (number, percent, span, seconds, exact, as_json, digest)
FUNCTIONS = (since, outline)
