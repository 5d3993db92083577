"""pgqueue itself: the worker of `python -m pgqueue.worker` with its defaults.

Jobs that sleep, or are in groups: 32 at once. Its handlers are async, for the kind "sync" sync. Producers: the client on a pool of psycopg
connections; bulk with lists of 5,000.
"""

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pgqueue
import uvloop
from psycopg import AsyncConnection

from bench.rivals.connections import Pooled, sql
from bench.rivals.driver import (
    AT_ONCE,
    RATE,
    STEPS,
    Durable,
    Handle,
    Kind,
    Payload,
    main,
)


class Pgqueue(Pooled):
    async def add(self, conn: AsyncConnection, payload: Payload) -> None:
        await pgqueue.enqueue(conn, "bench", payload)

    async def add_many(
        self, conn: AsyncConnection, payloads: list[Payload], priority: int
    ) -> None:
        keys = [payload["group"] for payload in payloads if "group" in payload]
        await pgqueue.enqueue_many(
            conn, "bench", payloads, priority=priority, group_keys=keys or None
        )

    async def install(self) -> None:
        await sql("create extension pgqueue")

    async def limit_groups(self) -> None:
        await sql("select pgqueue.configure('bench', group_limit => 1)")

    @asynccontextmanager
    async def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> AsyncIterator[None]:
        if kind == "rates":
            await sql(f"select pgqueue.configure('bench', rate_limit => {RATE})")
        uvloop.install()  # for async handlers, as an application would
        app = pgqueue.App()
        lock = threading.Lock()

        async def run(n: int, pad: str = "", group: str = "") -> None:
            await handle(n)

        def run_in_thread(n: int, pad: str = "") -> None:
            # A no-op handler awaits nothing: one step runs it to its end.
            with lock, contextlib.suppress(StopIteration):
                handle(n).send(None)

        app.job("bench")(run_in_thread if kind == "sync" else run)
        concurrency = AT_ONCE if kind in ("sleep", "groups", "rates") else 10
        worker = pgqueue.Worker(
            app, {"bench": 1}, concurrency=concurrency, on_commit=acknowledged
        )
        async with worker.running():
            yield

    async def emit(self, conn: AsyncConnection, n: int) -> None:
        await pgqueue.emit(conn, f"e{n}", {"n": n})

    @asynccontextmanager
    async def work_steps(self, do: Durable) -> AsyncIterator[None]:
        uvloop.install()
        app = pgqueue.App()

        @app.job("bench")
        async def run(job: pgqueue.Job, n: int) -> None:
            if do.waits:
                do.begun(n)
                await job.wait_for(f"e{n}")
            else:
                for place in range(STEPS):
                    await job.step(f"step {place}", do.step)
            do.done(n)

        async with pgqueue.Worker(app, {"bench": 1}, concurrency=10).running():
            yield


if __name__ == "__main__":
    main(Pgqueue())
