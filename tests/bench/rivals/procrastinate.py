"""procrastinate 3.10.0: psycopg pool of 10, uvloop, run_worker_async.

Its concurrency is 30, and 32 for jobs that sleep or are in groups, which are locks. Finished jobs are deleted (delete_jobs="always") and the worker is woken by LISTEN/NOTIFY.
The worker fetches one job a round trip and acknowledges each by itself; it has no
batching. Producers: a pool, task.defer_async; bulk: task.batch_defer_async, 5,000 a call.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from procrastinate import App, PsycopgConnector
from procrastinate.manager import JobManager
from procrastinate.tasks import Task

from bench.rivals.connections import sql
from bench.rivals.driver import AT_ONCE, Handle, Kind, Payload, main

CONCURRENCY: dict[Kind, int] = {
    "noop": 30,
    "sleep": AT_ONCE,
    "latency": 30,
    "groups": AT_ONCE,
}

logging.getLogger("procrastinate").setLevel(logging.ERROR)


class Producer:
    def __init__(self, task: Task) -> None:
        self.task = task

    async def add(self, payload: Payload) -> None:
        await self.task.defer_async(**payload)

    async def add_many(self, payloads: list[Payload], priority: int) -> None:
        if all("group" in payload for payload in payloads):
            # All jobs of a batch have the same lock.
            for payload in payloads:
                await self.task.configure(lock=payload["group"]).defer_async(**payload)
        else:
            task = self.task.configure(priority=priority)
            await task.batch_defer_async(*payloads)


def new_app(connections: int, handle: Handle | None = None) -> tuple[App, Task]:
    app = App(connector=PsycopgConnector(min_size=connections, max_size=connections))

    @app.task(name="bench", queue="bench")
    async def bench(n: int, pad: str = "", group: str = "") -> None:
        assert handle
        await handle(n)

    return app, bench


class Procrastinate:
    sql = staticmethod(sql)

    async def install(self) -> None:
        app, _ = new_app(1)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    async def limit_groups(self) -> None:
        """Locks need no setting."""

    @asynccontextmanager
    async def open(self, clients: int) -> AsyncIterator[Producer]:
        app, task = new_app(clients)
        async with app.open_async():
            yield Producer(task)

    @asynccontextmanager
    async def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> AsyncIterator[None]:
        class TellingManager(JobManager):
            async def finish_job(self, *args: Any, **named: Any) -> None:
                await super().finish_job(*args, **named)
                acknowledged()

        app, _ = new_app(10, handle)
        app.job_manager = TellingManager(app.connector)
        async with app.open_async():
            running = asyncio.create_task(
                app.run_worker_async(
                    concurrency=CONCURRENCY[kind],
                    delete_jobs="always",
                    listen_notify=True,
                    install_signal_handlers=False,
                )
            )
            try:
                yield
            finally:
                running.cancel()  # which it takes as the request to stop gracefully
                await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    main(Procrastinate())
