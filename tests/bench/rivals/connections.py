"""What the drivers that speak psycopg share: one statement, and connections for a producer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import psycopg

Pool = asyncio.Queue[psycopg.AsyncConnection]


async def connect() -> psycopg.AsyncConnection:
    """Connect as the environment says: autocommit, everything prepared."""
    return await psycopg.AsyncConnection.connect(autocommit=True, prepare_threshold=0)


async def sql(statement: str) -> Any:
    """Run one statement or script; the first value, if it has one."""
    async with await psycopg.AsyncConnection.connect(autocommit=True) as conn:
        cursor = await conn.execute(statement)
        row = await cursor.fetchone() if cursor.description else None
    return row and row[0]


@asynccontextmanager
async def pool(clients: int) -> AsyncIterator[Pool]:
    """Open so many connections."""
    found: Pool = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(clients):
            found.put_nowait(await stack.enter_async_context(await connect()))
        yield found


@asynccontextmanager
async def borrowed(connections: Pool) -> AsyncIterator[psycopg.AsyncConnection]:
    """Take one out of a pool for a while."""
    conn = await connections.get()
    yield conn
    connections.put_nowait(conn)


class Borrower:
    """A producer that borrows a connection for each call."""

    def __init__(self, connections: Pool) -> None:
        self.connections = connections


class Pooled:
    """What drivers share whose producer is a Borrower."""

    producer: ClassVar[type[Borrower]]
    sql = staticmethod(sql)

    @asynccontextmanager
    async def open(self, clients: int) -> AsyncIterator[Borrower]:
        async with pool(clients) as connections:
            yield self.producer(connections)
