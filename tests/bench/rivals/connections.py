"""What the drivers that speak psycopg share: one statement, and a producer with a pool."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from bench.rivals.driver import Payload


async def connect() -> psycopg.AsyncConnection:
    """Connect as the environment says: autocommit, everything prepared."""
    return await psycopg.AsyncConnection.connect(autocommit=True, prepare_threshold=0)


async def sql(statement: str) -> Any:
    """Run one statement or script; the first value, if it has one."""
    async with await psycopg.AsyncConnection.connect(autocommit=True) as conn:
        cursor = await conn.execute(statement)
        row = await cursor.fetchone() if cursor.description else None
    return row and row[0]


class Pooled:
    """What drivers share that add jobs on one of several connections."""

    sql = staticmethod(sql)

    async def add(self, conn: psycopg.AsyncConnection, payload: Payload) -> None:
        raise NotImplementedError

    async def add_many(
        self, conn: psycopg.AsyncConnection, payloads: list[Payload], priority: int
    ) -> None:
        raise NotImplementedError

    async def emit(self, conn: psycopg.AsyncConnection, n: int) -> None:
        raise NotImplementedError

    @asynccontextmanager
    async def open(self, clients: int) -> AsyncIterator["Pool"]:
        async with contextlib.AsyncExitStack() as stack:
            pool = Pool(self)
            for _ in range(clients):
                pool.free.put_nowait(await stack.enter_async_context(await connect()))
            yield pool


class Pool:
    """A producer that borrows a connection for each call."""

    def __init__(self, driver: Pooled) -> None:
        self.driver = driver
        self.free: asyncio.Queue[psycopg.AsyncConnection] = asyncio.Queue()

    async def add(self, payload: Payload) -> None:
        conn = await self.free.get()
        await self.driver.add(conn, payload)
        self.free.put_nowait(conn)

    async def add_many(self, payloads: list[Payload], priority: int) -> None:
        conn = await self.free.get()
        await self.driver.add_many(conn, payloads, priority)
        self.free.put_nowait(conn)

    async def emit(self, n: int) -> None:
        conn = await self.free.get()
        await self.driver.emit(conn, n)
        self.free.put_nowait(conn)
