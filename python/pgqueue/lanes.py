"""Where handlers run: `def` in threads, `async def` on an event loop in one more.

The worker's loop fills `todo`; a lane hands each finished job, with its report, to the
desk. A job is on the desk's `running` while its handler runs, and whoever takes it from
there, lane or watch, reports it: a timed-out thread that returns late says no more.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue

import psycopg
from psycopg.rows import TupleRow

from pgqueue import database
from pgqueue.app import Handler, Job, Report, begin
from pgqueue.client import to_json
from pgqueue.desk import COMPLETED, DONE, NO_CONNECTION, Desk, judge

log = logging.getLogger("pgqueue")

COMPLETE = "select pgqueue.complete(%s, %s, %s::jsonb)"
UNLIMITED = contextlib.nullcontext()


class Threads:
    """The lane of `def` handlers."""

    def __init__(self, desk: Desk, dsn: str, size: int) -> None:
        self.desk = desk
        self.dsn = dsn
        self.size = size
        self.todo: SimpleQueue[Job | None] = SimpleQueue()
        self.pulled_at = time.monotonic()

    def open(self) -> None:
        for _ in range(self.size):
            self.hire()

    def hire(self) -> None:
        """Start one more thread, also in the place of one whose job timed out."""
        threading.Thread(target=self._work, name="pgqueue-handler", daemon=True).start()

    def close(self) -> None:
        for _ in range(self.size):
            self.todo.put(None)

    def __len__(self) -> int:
        return self.todo.qsize()

    def put(self, jobs: Iterable[Job]) -> None:
        self.pulled_at = time.monotonic()
        for job in jobs:
            self.todo.put(job)

    def take_back(self) -> list[Job]:
        """Empty `todo`: the jobs that no handler has begun."""
        jobs = []
        with contextlib.suppress(Empty):
            while True:
                if job := self.todo.get_nowait():
                    jobs.append(job)
        return jobs

    def _work(self) -> None:
        desk = self.desk
        with contextlib.ExitStack() as connection:
            transact = _Transact(self.dsn, connection)
            while (job := self.todo.get()) is not None:
                self.pulled_at = now = time.monotonic()
                if desk.start(job, now) and not desk.finish(
                    job, self._attempt(job, transact)
                ):
                    return  # timed out: another thread has this one's place

    def _attempt(self, job: Job, transact: "_Transact") -> Report:
        try:
            begin(job)
            if job.handler.transaction:
                return transact(job)
            result = to_json(job.handler(job), "result")
            return COMPLETED if result is None else Report("complete", result)
        except BaseException as error:  # whatever a handler raises fails its job only
            return judge(job, error)


class _Transact:
    """One thread's connection for handlers that complete in their own transaction."""

    def __init__(self, dsn: str, stack: contextlib.ExitStack) -> None:
        self.dsn = dsn
        self.stack = stack
        self.conn: database.Connection | None = None

    def __call__(self, job: Job) -> Report:
        with contextlib.ExitStack() as transaction:
            try:
                conn = job.conn = self._begin(transaction)
            except psycopg.Error as error:
                log.warning(
                    "no connection for the handler of job %s: %s", job.id, error
                )
                return NO_CONNECTION
            result = to_json(job.handler(job), "result")
            conn.execute(COMPLETE, (job.id, job.token, result))
        return DONE

    def _begin(self, transaction: contextlib.ExitStack) -> database.Connection:
        if self.conn is not None:
            # It may have died since the last job, which is not this job's fault.
            with contextlib.suppress(psycopg.Error):
                transaction.enter_context(self.conn.transaction())
                return self.conn
            self.conn.close()
        self.conn = self.stack.enter_context(
            contextlib.closing(database.connect(self.dsn))
        )
        transaction.enter_context(self.conn.transaction())
        return self.conn


class Tasks:
    """The lane of `async def` handlers."""

    def __init__(self, desk: Desk, dsn: str, size: int) -> None:
        self.desk = desk
        self.dsn = dsn
        self.size = size
        self.todo: deque[Job | None] = deque()
        self.pulled_at = time.monotonic()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.new_event_loop()

    def open(self) -> None:
        threading.Thread(target=self._run, name="pgqueue-loop", daemon=True).start()

    def close(self) -> None:
        self.todo.extend([None] * self.size)
        self._loop.call_soon_threadsafe(self._wake)

    def __len__(self) -> int:
        return len(self.todo)

    def put(self, jobs: Iterable[Job]) -> None:
        self.pulled_at = time.monotonic()
        self.todo.extend(jobs)
        self._loop.call_soon_threadsafe(self._wake)

    def take_back(self) -> list[Job]:
        """Empty `todo`: the jobs that no handler has begun."""
        jobs = []
        with contextlib.suppress(IndexError):
            while True:
                if job := self.todo.popleft():
                    jobs.append(job)
        return jobs

    def cancel(self, job: Job) -> None:
        """Cancel the handler of a job, from any thread."""
        self._loop.call_soon_threadsafe(self._cancel, job)

    def _cancel(self, job: Job) -> None:
        if job.task and job in self.desk.running:
            job.task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._pull_all())

    async def _pull_all(self) -> None:
        await asyncio.gather(*(self._pull() for _ in range(self.size)))

    def _wake(self) -> None:
        for _ in range(min(len(self.todo), len(self._idle))):
            self._idle.popleft().set_result(None)

    async def _pull(self) -> None:
        async with contextlib.AsyncExitStack() as connection:
            transact = _AsyncTransact(self.dsn, connection)
            breath = time.monotonic()
            while True:
                if not self.todo:
                    self._idle.append(self._loop.create_future())
                    await self._idle[-1]
                    continue
                if (job := self.todo.popleft()) is None:
                    return
                self.pulled_at = now = time.monotonic()
                # Handlers that never await must not keep the loop from its own work.
                if now > breath + 0.005:
                    await asyncio.sleep(0)
                    breath = now = time.monotonic()
                if self.desk.start(job, now):
                    self.desk.finish(job, await self._attempt(job, transact))

    async def _attempt(self, job: Job, transact: "_AsyncTransact") -> Report:
        job.task = asyncio.current_task()
        try:
            begin(job)
            async with _limit(job.handler.timeout):
                if job.handler.transaction:
                    return await transact(job)
                result = to_json(await job.handler(job), "result")
            return COMPLETED if result is None else Report("complete", result)
        except BaseException as error:  # whatever a handler raises fails its job only
            if job.task and isinstance(error, asyncio.CancelledError):
                job.task.uncancel()
            return judge(job, error)


class _AsyncTransact:
    """One puller's connection for handlers that complete in their own transaction."""

    def __init__(self, dsn: str, stack: contextlib.AsyncExitStack) -> None:
        self.dsn = dsn
        self.stack = stack
        self.conn: psycopg.AsyncConnection[TupleRow] | None = None

    async def __call__(self, job: Job) -> Report:
        async with contextlib.AsyncExitStack() as transaction:
            try:
                conn = job.conn = await self._begin(transaction)
            except psycopg.Error as error:
                log.warning(
                    "no connection for the handler of job %s: %s", job.id, error
                )
                return NO_CONNECTION
            result = to_json(await job.handler(job), "result")
            await conn.execute(COMPLETE, (job.id, job.token, result))
        return DONE

    async def _begin(
        self, transaction: contextlib.AsyncExitStack
    ) -> psycopg.AsyncConnection[TupleRow]:
        if self.conn is not None:
            with contextlib.suppress(psycopg.Error):
                await transaction.enter_async_context(self.conn.transaction())
                return self.conn
            await self.conn.close()
        self.conn = await database.connect_async(self.dsn)
        self.stack.push_async_callback(self.conn.close)
        await transaction.enter_async_context(self.conn.transaction())
        return self.conn


def _limit(seconds: float | None) -> contextlib.AbstractAsyncContextManager[object]:
    # A timeout that never comes is a fifth of what a quick async job costs here.
    return UNLIMITED if seconds is None else asyncio.timeout(seconds)


def watch(desk: Desk, threads: Threads, tasks: Tasks, is_over: threading.Event) -> None:
    """Fail what runs too long in a thread, and cancel on the loop what must not go on.

    It never talks to the server, so it fences also when nobody can.
    """
    while not is_over.wait(0.25):
        for job in list(desk.running):
            handler: Handler = job.handler
            if handler.is_async:
                if job.lost or job.cancelled:
                    tasks.cancel(job)
            elif (
                handler.timeout is not None
                and time.monotonic() > job.started + handler.timeout
                and desk.finish(
                    job, Report("fail", f"timed out after {handler.timeout} seconds")
                )
            ):
                log.warning("%r timed out; its thread runs on", job)
                threads.hire()
