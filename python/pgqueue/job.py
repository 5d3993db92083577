"""The job as its handler sees it."""

import time
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any


@dataclass(slots=True, eq=False)
class Job:
    """A job, and its running attempt."""

    id: int
    queue: str
    kind: str
    attempt: int  # 1 the first time
    max_attempts: int
    payload: Any  # decoded JSON
    headers: Any  # likewise; None without headers
    deadline: datetime | None  # the end of its timeout, in UTC; None without one
    batch_id: int | None  # the batch it is part of; None for none
    _attempt: Any = field(repr=False)  # the Attempt that it belongs to

    @property
    def cancelled(self) -> bool:
        """Whether an operator has called pgqueue.cancel(): stop soon."""
        return bool(self._attempt.is_cancelled)

    @property
    def lost(self) -> bool:
        """Whether the lease is lost, according to the server or this machine's clock."""
        return bool(time.monotonic() >= self._attempt.expires)

    def extend(self) -> bool:
        """Extend the lease now by pgqueue.extend(), and return whether to go on.

        The worker does so automatically every third of the lease. This call blocks for a round
        trip (async: `await asyncio.to_thread(job.extend)`) and may raise psycopg.Error.
        """
        return bool(self._attempt.extend())

    def progress(
        self,
        done: float | Decimal,
        total: float | Decimal | None = None,
        message: str | None = None,
    ) -> None:
        """Report progress by pgqueue.progress(), for others to see.

        It costs next to nothing: the worker sends the latest about once a second, in a thread
        of its own. Numbers that Postgres refuses only show up in the log.
        """
        self._attempt.tell(done, total, message)

    @property
    def connection(self) -> Any:
        """The connection whose transaction also completes the job (transaction=True).

        A psycopg.Connection, or in an async handler a psycopg.AsyncConnection. Raises
        RuntimeError for other handlers.
        """
        if self._attempt.connection is None:
            raise RuntimeError("a connection needs @app.job(..., transaction=True)")
        return self._attempt.connection
