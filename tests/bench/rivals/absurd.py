"""absurd by its Python SDK, async, 30 at once: durable jobs only, so it only knows `steps`.

Its schema is in no package: BENCH_ABSURD_SQL names the file sql/absurd.sql of its repository.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from absurd_sdk import AsyncAbsurd
from psycopg import AsyncConnection

from bench.rivals.connections import Pooled, connect, sql
from bench.rivals.driver import STEPS, Durable, Payload, main


class Absurd(Pooled):
    async def add_many(
        self, conn: AsyncConnection, payloads: list[Payload], priority: int
    ) -> None:
        client = AsyncAbsurd(conn, queue_name="bench")
        for payload in payloads:
            await client.spawn("bench", payload, queue="bench")

    async def install(self) -> None:
        await sql(Path(os.environ["BENCH_ABSURD_SQL"]).read_text())
        await sql("select absurd.create_queue('bench')")

    async def emit(self, conn: AsyncConnection, n: int) -> None:
        await AsyncAbsurd(conn, queue_name="bench").emit_event(f"e{n}", {"n": n})

    @asynccontextmanager
    async def work_steps(self, do: Durable) -> AsyncIterator[None]:
        client = AsyncAbsurd(await connect(), queue_name="bench")

        @client.register_task("bench", queue="bench")
        async def run(params: Payload, context: Any) -> None:
            n = params["n"]
            if do.waits:
                do.begun(n)
                await context.await_event(f"e{n}")
            else:
                for place in range(STEPS):
                    await context.step(f"step {place}", do.step)
            do.done(n)

        worker = asyncio.create_task(
            client.start_worker(concurrency=30, poll_interval=0.05)
        )
        try:
            yield
        finally:
            client.stop_worker()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker, 10)


if __name__ == "__main__":
    main(Absurd())
