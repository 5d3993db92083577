"""What is measured: each system as the SQL that its own documentation recommends."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PAYLOAD = '{"user": 4711, "template": "welcome", "to": "ada@example.org"}'


@dataclass(frozen=True)
class System:
    """One queue, driven by SQL alone.

    enqueue is one job in one statement; bulk(n) adds n jobs in one, and tomorrow(n), where
    there is such a thing, n that are due tomorrow, at a higher priority; lifecycle(batch)
    is a pgbench script that takes a batch and finishes it, in two transactions;
    take(batch) and finish do the same for a client: take returns rows whose columns, as
    arrays, are what finish is given. notify and quiet switch the notification of workers
    on and off, where that is not the system's own affair; idle is what the session of an
    idle worker says to be notified.
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
    tomorrow: Callable[[int], str] | None = None
    notify: str = ""
    quiet: str = ""
    idle: str = ""


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
        tomorrow=lambda n: (
            "select count(*) from pgqueue.enqueue_many('bench', "
            f"array(select '{PAYLOAD}'::jsonb from generate_series(1, {n})), "
            "priority => 9, run_at => now() + interval '1 day')"
        ),
        idle="listen pgqueue; select pgqueue.park(array['bench'])",
    )


def pgmq(folder: Path) -> System | None:
    """pgmq's SQL file comes with its PyPI package; None where that is not installed."""
    script = next(folder.glob("pgmq/lib/python*/site-packages/pgmq/sql/pgmq.sql"), None)
    if script is None:
        return None
    return System(
        name="pgmq",
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
        tomorrow=lambda n: (
            "select count(*) from pgmq.send_batch('bench', "
            f"array(select '{PAYLOAD}'::jsonb from generate_series(1, {n})), 86400)"
        ),
        notify="select pgmq.enable_notify_insert('bench', 0)",
        quiet="select pgmq.disable_notify_insert('bench')",
        idle='listen "pgmq.q_bench.INSERT"',
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


def systems(folder: Path) -> list[System]:
    """All that there are; pgmq if it is installed below the folder."""
    return [each for each in (pgqueue(), pgmq(folder), reference()) if each]
