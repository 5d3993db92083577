"""awa 0.6.9: its engine in Rust, queue storage, async handlers, uvloop, a pool of 10.

A queue has 256 workers (32 for jobs that sleep) and claims up to 512 jobs at once, its
default; it is woken by LISTEN/NOTIFY and polls each 50 ms, and each 200 ms, its default, for
latency. Completions are written by batches of its own; nothing tells of them, so that what is
measured ends with the worker's shutdown, which waits for them. Of its four priorities the
drivers' are shared out among. Producers: AsyncClient.insert; bulk: enqueue_many_copy.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from os import environ

from awa import AsyncClient

from bench.rivals.connections import sql
from bench.rivals.driver import AT_ONCE, Handle, Kind, Payload, main
from bench.statements import AWA_SAVE

URL = "postgresql://{PGUSER}@localhost/{PGDATABASE}?host={PGHOST}&port={PGPORT}"
WORKERS: dict[Kind, int] = {"noop": 256, "sleep": AT_ONCE, "latency": 50}
POLL: dict[Kind, int] = {"latency": 200}


@dataclass
class Bench:
    n: int
    pad: str = ""


def client(connections: int) -> AsyncClient:
    known = {"PGUSER": "postgres", "PGPORT": "5432", **environ}
    return AsyncClient(URL.format(**known), max_connections=connections)


class Producer:
    def __init__(self, client: AsyncClient) -> None:
        self.client = client

    async def add(self, payload: Payload) -> None:
        await self.client.insert(Bench(**payload), queue="bench")

    async def add_many(
        self, payloads: list[Payload], priority: int, tomorrow: bool = False
    ) -> None:
        """Its most urgent priority is 1, the least one 4."""
        jobs = [Bench(**payload) for payload in payloads]
        run_at = datetime.now(UTC) + timedelta(days=1) if tomorrow else None
        await self.client.enqueue_many_copy(
            jobs, queue="bench", priority=4 - min(priority, 10) * 3 // 10, run_at=run_at
        )


class Awa:
    sql = staticmethod(sql)

    async def install(self) -> None:
        async with client(2) as one:
            await one.migrate()
        # As the first worker would do.
        await sql("select awa.storage_auto_finalize_if_fresh('awa')")
        await sql(AWA_SAVE)

    async def limit_groups(self) -> None:
        """It has no groups."""

    @asynccontextmanager
    async def open(self, clients: int) -> AsyncIterator[Producer]:
        async with client(clients) as one:
            yield Producer(one)

    @asynccontextmanager
    async def work(
        self, kind: Kind, handle: Handle, acknowledged: Callable[[], None]
    ) -> AsyncIterator[None]:
        worker = client(10)

        @worker.task(Bench, queue="bench")
        async def bench(job) -> None:
            await handle(job.args.n)

        queue = {"name": "bench", "max_workers": WORKERS[kind]}
        await worker.start([queue], poll_interval_ms=POLL.get(kind, 50))
        try:
            yield
        finally:
            await worker.shutdown(20_000)
            acknowledged()
            await worker.close()


if __name__ == "__main__":
    main(Awa())
