"""What a handler sees of its job."""

import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol


class Lease(Protocol):
    """The worker's hold on a job."""

    expires: float  # in this machine's monotonic seconds
    is_cancelled: bool  # an operator asked it to stop
    connection: Any

    def extend(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Job:
    """One attempt of a job."""

    id: int
    queue: str
    kind: str
    attempt: int  # 1 the first time
    max_attempts: int
    payload: Any
    headers: Any
    deadline: datetime | None  # when its timeout is over, in UTC
    _lease: Lease = field(repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether an operator asked it to stop: pgqueue.cancel()."""
        return self._lease.is_cancelled

    @property
    def lost(self) -> bool:
        """Whether the lease is over, by the server's word or this machine's clock."""
        return time.monotonic() >= self._lease.expires

    def extend(self) -> bool:
        """Extend the lease now, and return whether to go on: pgqueue.extend().

        The worker does so by itself at a third of the lease. This one waits for a round
        trip (async: `await asyncio.to_thread(job.extend)`) and may raise psycopg.Error.
        """
        return self._lease.extend()

    @property
    def connection(self) -> Any:
        """The connection whose transaction also completes the job (transaction=True).

        A psycopg.Connection, or in an async handler a psycopg.AsyncConnection. Raises
        RuntimeError for other handlers.
        """
        if self._lease.connection is None:
            raise RuntimeError("a connection needs @app.job(..., transaction=True)")
        return self._lease.connection
