"""What a worker is told: its app, its queues and its options."""

import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral

from pgqueue.app import App

POLL_INTERVAL = 0.01  # seconds, at least: to notice that nothing is due
WHOLE = "concurrency batch max_jobs".split()
# What replaces threads, how to ask it, and for what.
MONKEYS = (
    ("gevent.monkey", "is_module_patched", "threading"),
    ("eventlet.patcher", "is_monkey_patched", "thread"),
)
POSITIVE = "lease timeout poll_interval call_timeout concurrency max_jobs".split()


@dataclass(frozen=True)
class Share:
    """A queue's part of a worker.

    With twice the weight of another queue it gets twice as many jobs, while both have some. At
    most `limit` of its jobs run at once; None means no limit.
    """

    weight: int = 1
    limit: int | None = None

    def __post_init__(self) -> None:
        for n in self.weight, 1 if self.limit is None else self.limit:
            if not isinstance(n, Integral) or n < 1:
                said = "weight and limit must be whole numbers, at least 1"
                raise ValueError(f"{said}, not {n!r}")

    def __str__(self) -> str:
        """Write it as --queue has it, behind the name."""
        weight = f"={self.weight}" if self.weight != 1 else ""
        return f"{weight}:{self.limit}" if self.limit else weight


@dataclass(eq=False, repr=False)
class Terms:
    """The options of a worker, checked; `id` is its name on the server."""

    app: App
    queues: Mapping[str, Share | int] | None = None
    _: KW_ONLY
    dsn: str | Sequence[str] | None = None
    name: str | None = None
    concurrency: int = 10
    batch: int = 5000
    lease: float | None = None
    timeout: float | None = None
    poll_interval: float = 5.0
    call_timeout: float | None = None
    shutdown_timeout: float = 30.0
    listen: bool = True
    burst: bool = False
    only_known: bool = False
    max_jobs: int | None = None
    on_tick: Callable[[], None] = lambda: None
    on_commit: Callable[[], None] = lambda: None
    on_lease: Callable[[float], None] = lambda seconds: None

    def __post_init__(self) -> None:
        for module, asks, what in MONKEYS:
            if (loaded := sys.modules.get(module)) and getattr(loaded, asks)(what):
                said = f"a worker needs real threads, and {module} has replaced them"
                raise ValueError(said)
        if not isinstance(self.queues, Mapping | None):
            said = f"a weight for each, as {{'emails': 1}}, not {self.queues!r}"
            raise TypeError(f"queues takes {said}")
        if self.queues == {}:
            raise ValueError("a worker needs a queue")
        for option in POSITIVE:
            value = getattr(self, option)
            if value is not None and not value > 0:
                raise ValueError(f"{option} must be positive, not {value!r}")
        for option in WHOLE:
            value = getattr(self, option)
            if value is not None and not isinstance(value, Integral):
                raise ValueError(f"{option} must be a whole number, not {value!r}")
        self.poll_interval = max(self.poll_interval, POLL_INTERVAL)
        if self.only_known and not self.app.tasks:
            raise ValueError("only_known, but the app has no handler")
        for task in self.app.tasks.values():
            task.arguments.reading  # noqa: B018, it raises
        name = (self.name or socket.gethostname()).encode(errors="replace")[:150]
        name_and_pid = f"{name.decode(errors='ignore')}:{os.getpid()}"
        self.id = f"{name_and_pid}:{secrets.token_hex(4)}"
        self.listen = self.listen and not self.burst
        own = dict.fromkeys(self.app.queues or ["default"], 1)
        self.shares = {
            name: share if isinstance(share, Share) else Share(share)
            for name, share in (self.queues or own).items()
        }

    @property
    def kinds(self) -> list[str] | None:
        """The kinds to claim; None is all."""
        return list(self.app.tasks) if self.only_known else None
