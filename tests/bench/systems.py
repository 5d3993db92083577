"""What is measured: each system as the SQL that its own documentation recommends."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PAYLOAD = '{"user": 4711, "template": "welcome", "to": "ada@example.org"}'


@dataclass(frozen=True)
class System:
    """One queue, driven by SQL alone.

    enqueue is one job in one statement; bulk(n) and backlog(n) add n jobs in one; lifecycle(batch) is a
    pgbench script that takes a batch and finishes it, in two transactions; take(batch) and
    finish do the same for a client: take returns rows whose columns, as arrays, are what
    finish is given.
    """

    name: str
    setup: str
    enqueue: str
    bulk: Callable[[int], str]
    lifecycle: Callable[[int], str]
    take: Callable[[int], str]
    finish: str
    depth: str
    reset: str


def pgqueue() -> System:
    return System(
        name="pgqueue",
        setup="create extension pgqueue",
        enqueue=f"select pgqueue.enqueue('bench', '{PAYLOAD}')",
        bulk=lambda n: (
            "select count(*) from pgqueue.enqueue_many('bench', "
            f"array(select '{PAYLOAD}'::jsonb from generate_series(1, {n})))"
        ),
        lifecycle=lambda batch: (
            "select id, token from pgqueue.claim('bench', 'w') \\gset\n"
            "select pgqueue.complete(:id, :token);\n"
            if batch == 1
            else "select string_agg(id::text, ',') as ids, string_agg(token::text, ',') as tokens "
            f"from pgqueue.claim('bench', 'w', {batch}) \\gset\n"
            "select count(*) from pgqueue.complete_many('{:ids}', '{:tokens}');\n"
        ),
        take=lambda batch: (
            f"select id, token from pgqueue.claim('bench', 'w', {batch})"
        ),
        finish="select count(*) from pgqueue.complete_many(%s, %s)",
        depth="select count(*) from pgqueue.job",
        reset="truncate pgqueue.job, pgqueue.run",
    )


def pgmq() -> System | None:
    """pgmq's SQL file comes with its PyPI package; None where that is not installed."""
    package = importlib.util.find_spec("pgmq")
    if not package or not package.submodule_search_locations:
        return None
    script = Path(package.submodule_search_locations[0]) / "sql" / "pgmq.sql"
    return System(
        name=f"pgmq {(script.parent / 'VERSION').read_text().strip()}",
        setup=f"create schema if not exists pgmq;{script.read_text()};select pgmq.create('bench')",
        enqueue=f"select pgmq.send('bench', '{PAYLOAD}')",
        bulk=lambda n: (
            "select count(*) from pgmq.send_batch('bench', "
            f"array(select '{PAYLOAD}'::jsonb from generate_series(1, {n})))"
        ),
        lifecycle=lambda batch: (
            "select msg_id from pgmq.read('bench', 30, 1) \\gset\n"
            "select pgmq.delete('bench', :msg_id::bigint);\n"
            if batch == 1
            else "select string_agg(msg_id::text, ',') as ids "
            f"from pgmq.read('bench', 30, {batch}) \\gset\n"
            "select count(*) from pgmq.delete('bench', '{:ids}'::bigint[]);\n"
        ),
        take=lambda batch: f"select msg_id from pgmq.read('bench', 30, {batch})",
        finish="select count(*) from pgmq.delete('bench', %s::bigint[])",
        depth="select count(*) from pgmq.q_bench",
        reset="truncate pgmq.q_bench",
    )


def reference() -> System:
    """No queue at all: what the same cluster does with bare statements."""
    return System(
        name="bare SQL",
        setup="create table bare (id bigint generated always as identity primary key, payload jsonb)",
        enqueue=f"insert into bare (payload) values ('{PAYLOAD}')",
        bulk=lambda n: (
            f"insert into bare (payload) select '{PAYLOAD}' from generate_series(1, {n})"
        ),
        lifecycle=lambda batch: (
            "delete from bare where ctid = any (array("
            f"select ctid from bare order by id limit {batch} for update skip locked));\n"
        ),
        take=lambda batch: (
            f"select id from bare order by id limit {batch} for update skip locked"
        ),
        finish="delete from bare where id = any (%s)",
        depth="select count(*) from bare",
        reset="truncate bare",
    )


def systems() -> list[System]:
    return [each for each in (pgqueue(), pgmq(), reference()) if each]
