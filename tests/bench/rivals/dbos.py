"""DBOS, async workflows, no bound on how many run at once: durable jobs, so it only knows `steps`.

A workflow that waits for a message is kept in memory, and not ended.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dbos import DBOS, DBOSClient
from psycopg import AsyncConnection

from bench.rivals.connections import Pooled
from bench.rivals.driver import STEPS, Durable, Payload, main

URL = "postgresql+psycopg://{PGUSER}@/{PGDATABASE}?host={PGHOST}&port={PGPORT}"


def url() -> str:
    return URL.format(**{"PGUSER": "postgres", "PGPORT": "5432", **os.environ})


class Dbos(Pooled):
    client: DBOSClient | None = None

    async def add_many(
        self, conn: AsyncConnection, payloads: list[Payload], priority: int
    ) -> None:
        client = DBOSClient(system_database_url=url())
        for payload in payloads:
            n = payload["n"]
            await client.enqueue_async(
                {"workflow_name": "run", "queue_name": "bench", "workflow_id": str(n)},
                n,
            )

    async def install(self) -> None:
        self.configure()
        DBOS.launch()
        await DBOS.register_queue_async("bench", polling_interval_sec=0.05)
        DBOS.destroy()

    def configure(self) -> None:
        DBOS(config={"name": "bench", "system_database_url": url()})

    async def emit(self, conn: AsyncConnection, n: int) -> None:
        self.client = self.client or DBOSClient(system_database_url=url())
        await self.client.send_async(str(n), {"n": n}, "event")

    @asynccontextmanager
    async def work_steps(self, do: Durable) -> AsyncIterator[None]:
        self.configure()

        @DBOS.step()
        async def step() -> int:
            return await do.step()

        @DBOS.workflow(name="run")
        async def run(n: int) -> None:
            if do.waits:
                do.begun(n)
                await DBOS.recv_async("event", 600)
            else:
                for _ in range(STEPS):
                    await step()
            do.done(n)

        DBOS.launch()
        try:
            yield
        finally:
            await asyncio.to_thread(DBOS.destroy)


if __name__ == "__main__":
    main(Dbos())
