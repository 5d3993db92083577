"""Every public function, called with random, hostile and boundary arguments.

Whatever comes, a call ends within seconds, in an answer or in an SQLSTATE that the comment of
the function names. PGQUEUE_SEED chooses other calls; the long form does so by itself, and says
which when it fails. PGQUEUE_TEST_CALLS says how many, a million in an hour.
"""

import os
import random
import re
from contextlib import nullcontext
from typing import NamedTuple

import psycopg
import pytest
from conftest import LONG, database
from test_errors import raised

SEED = int(os.environ.get("PGQUEUE_SEED") or (random.randrange(1 << 30) if LONG else 1))
CALLS = int(os.environ.get("PGQUEUE_TEST_CALLS", 50_000 if LONG else 1_000))
EACH = 500  # calls in one database
# These take all the same arguments, or none, and look at everything.
SLOW = {"health", "metrics", "maintain", "version"}

# What is tried for an argument of a type, as SQL; the first three are sensible.
HOSTILE = {
    kind: re.split(r"\s*¦\s*", values)
    for kind, values in {
        "text": r"""'q' ¦ 'a' ¦ '1' ¦ '' ¦ ' ' ¦ E'\n' ¦ E'\x01' ¦ '%s %1$s %' ¦ '''; select 1; --' ¦ 'é😀' ¦ 'null'
            ¦ '{}' ¦ 'a=b' ¦ '*' ¦ 'x*' ¦ '-1' ¦ '+99' ¦ 'infinity' ¦ chr(1114111) ¦ repeat('x', 200) ¦ repeat('x', 201)
            ¦ repeat('é', 200) ¦ repeat('x', 100000) ¦ '\' ¦ 'x%\' ¦ '{1,{2}}' ¦ '0 0 31 2 *' ¦ '*/0 * * * *' ¦ '@every'
            ¦ '99999999999 * * * *' ¦ '0 0 * * 7#6' ¦ '1-99999999999999999999 * * * *'""",
        "integer": """1 ¦ 2 ¦ 10 ¦ 0 ¦ -1 ¦ 100 ¦ 101 ¦ -100 ¦ -101 ¦ 10000 ¦ 10001 ¦ 32767 ¦ 32768 ¦ 2147483647
            ¦ -2147483648""",
        "bigint": "1 ¦ 2 ¦ 3 ¦ 0 ¦ -1 ¦ 4294967296 ¦ 9223372036854775807 ¦ -9223372036854775808",
        "numeric": """1 ¦ 0.5 ¦ 100 ¦ 0 ¦ -1 ¦ 1e-300 ¦ 1e300 ¦ 1e-16000 ¦ 1e131000 ¦ -1e131000 ¦ 'nan' ¦ 'infinity'
            ¦ '-infinity'""",
        "timestamp with time zone": """now() ¦ now() + interval '1 hour' ¦ now() - interval '1 hour' ¦ 'infinity'
            ¦ '-infinity' ¦ now() + interval '400 days' ¦ 'epoch' ¦ '0001-01-01 BC' ¦ '9999-12-31 23:59:59+00'
            ¦ '4714-11-24 00:00:00+00 BC' ¦ '294276-12-31 23:59:59.999999+00'""",
        "interval": """'1 s' ¦ '1 hour' ¦ '1 day' ¦ '0' ¦ '-1 s' ¦ '1 us' ¦ '30 days' ¦ '31 days' ¦ '366 days' ¦ '367 days'
            ¦ '1 mon' ¦ '1 mon -30 days' ¦ '1 day -24 hours' ¦ '100 years' ¦ '178000000 years' ¦ '-178000000 years'
            ¦ '2147483647 days' ¦ '-2147483648 days' ¦ '2147483647 mons' ¦ '2562047788:00:54.775807'
            ¦ '-2562047788:00:54.775807'""",
        "jsonb": r"""'{}' ¦ '{"a": {"b": null}}' ¦ '1' ¦ 'null' ¦ '[]' ¦ '"x"' ¦ 'true' ¦ '1e400' ¦ '"\u0001"' ¦ '{"": ""}'
            ¦ '{"traceparent": 1}' ¦ (repeat('[', 1000) || repeat(']', 1000))::jsonb ¦ to_jsonb(repeat('x', 100000))""",
        "boolean": "true ¦ false ¦ null",
        "regprocedure": "'handle(jsonb)' ¦ 'handle(pgqueue.job)' ¦ 'handle(jsonb)' ¦ 'now()' ¦ 0 ¦ 4294967295",
    }.items()
}
# What is useful for an argument of a name, so that many calls get far.
USEFUL = {
    name: values.split(" ¦ ")
    for name, values in {
        "queue": "'q' ¦ 'r'",
        "queues": "'{q}' ¦ '{q,r}' ¦ '{r,q,q}'",
        "kind": "'a' ¦ 'b' ¦ 'producer' ¦ 'reader'",
        "kinds": "'{a}' ¦ '{a,b}'",
        "group_key": "'g' ¦ 'h'",
        "group_keys": "'{g,h}' ¦ array['g', null]",
        "unique_key": "'k' ¦ 'l'",
        "unique_keys": "'{k,l}' ¦ array[null, 'm']",
        "payloads": "'{1,2}'",
        "name": "'s' ¦ 't'",
        "cron": "'@daily' ¦ '*/5 * * * *' ¦ '0 0 29 2 *' ¦ '* * * * 1-5' ¦ '0 0 L * *'",
        "timezone": "'UTC' ¦ 'Europe/Berlin' ¦ 'Pacific/Apia'",
        "on_duplicate": "'skip' ¦ 'replace' ¦ 'postpone' ¦ 'error'",
        "if_dead": "'cancel' ¦ 'run'",
        "outcomes": "'{complete}' ¦ '{fail,release}' ¦ '{reject,complete}' ¦ '{suspend,suspend}'",
        "texts": r"""'{x}' ¦ '{x,null}' ¦ array['{"event": "e"}', '{"run_at": "2031-01-01T00:00:00Z", "after": [1]}']""",
        "event": "'e' ¦ 'f'",
        "delays": "'{1 s}' ¦ '{1 s,null}'",
        "role": "'pgqueue_nobody' ¦ 'PGQUEUE_NOBODY' ¦ 'public' ¦ 'postgres' ¦ 'none'",
        "catch_up": "'one' ¦ 'all' ¦ 'none'",
        "batch_id": "(select max(id) from pgqueue.batch)",
        "dead_id": "(select id from pgqueue.dead_job order by random() limit 1)",
        "error_like": r"'%' ¦ 'e%' ¦ 'e\'",
        "bigint": "(select id from pgqueue.job order by random() limit 1) ¦ (select job_id from pgqueue.run limit 1)",
        "bigint[]": "array(select id from pgqueue.job order by random() limit 2)",
    }.items()
}
LEASED = "from pgqueue.job where token is not null order by id"
LEASES = {
    "job_id": f"(select id {LEASED} limit 1)",
    "token": f"(select token {LEASED} limit 1)",
    "job_ids": f"array(select id {LEASED} limit 2)",
    "tokens": f"array(select token {LEASED} limit 2)",
}


class Function(NamedTuple):
    name: str
    arguments: list[tuple[str, str, bool]]  # name, type, whether it may be left out
    allowed: set[str]


def functions(db: psycopg.Connection) -> list[Function]:
    """Every public function, and the SQLSTATEs that its comment names."""
    rows = db.execute(
        "select p.proname, obj_description(p.oid, 'pg_proc'), p.proargnames, p.pronargdefaults,"
        " array(select format_type(t, null) from unnest(p.proargtypes) with ordinality as a (t, n) order by n)"
        " from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace and p.proname !~ '^_'"
        " order by 1"
    )
    found = [
        Function(
            name,
            [
                (argument, kind, n >= len(types) - optional)
                for n, (argument, kind) in enumerate(
                    zip(names or [], types, strict=False)
                )
            ],
            raised(comment),
        )
        for name, comment, names, optional, types in rows
    ]
    allowed = {function.name: function.allowed for function in found}
    allowed["enqueue_row"] |= allowed["enqueue"]  # as its comment says, in words
    return found


def cast(value: str, kind: str) -> str:
    return f"cast({value} as {kind})"


class Fuzz:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def argument(self, name: str, kind: str, tame: bool) -> str:
        if tame and name in LEASES:
            return LEASES[name]
        chance = self.random.random()
        useful = USEFUL.get(name) or USEFUL.get(kind)
        if useful and chance < (0.95 if tame else 0.4):
            return cast(self.random.choice(useful), kind)
        if chance > 0.97:
            return cast("null", kind)
        if tame and kind in HOSTILE:
            return cast(self.random.choice(HOSTILE[kind][:3]), kind)
        element = kind.removesuffix("[]")
        if element == kind:
            return cast(self.random.choice(HOSTILE[kind]), kind)
        some = [
            cast(self.random.choice([*HOSTILE[element], "null"]), element)
            for _ in range(self.random.randrange(1, 4))
        ]
        shapes = [f"array[{', '.join(some)}]"] * 7
        shapes += [f"array[array[{some[0]}]]", cast("'{}'", kind)]
        shapes += [f"array_fill({some[0]}, array[2], array[0])"]
        return self.random.choice(shapes)

    def call(self, function: Function) -> list[str]:
        """One call, as the statements of a transaction."""
        if function.name == "enqueue_row":
            return self.trigger()
        tame = self.random.random() < 0.6
        often = min(0.25, 2 / (len(function.arguments) or 1))
        given = [
            (name, self.argument(name, kind, tame))
            for name, kind, optional in function.arguments
            if not optional or self.random.random() < often
        ]
        listed = ", ".join(f"{name} => {value}" for name, value in given)
        verb = "call" if function.name == "work" else "select * from"
        return [f"{verb} pgqueue.{function.name}({listed})"]

    def trigger(self) -> list[str]:
        names = ["queue", "kind", "columns", "run_in", "priority", "key", "group_key"]
        names += ["payload", "max_attempts", "", "queue "]
        values = [
            "q",
            "id",
            "t",
            "id,t",
            "5",
            "-1",
            "1 hour",
            "1 s",
            "no",
            "",
            "178000000 years",
        ]
        values += ["99999999999999999999", "{}", "id,id", "%s", "infinity", "x" * 201]
        given = [
            f"'{self.random.choice(names)}={self.random.choice(values)}'"
            for _ in range(self.random.randrange(3))
        ]
        if self.random.random() < 0.8:
            given.insert(0, "'queue=q'")
        fires = self.random.choice(["insert", "insert or update"])
        return [
            f"create or replace trigger t after {fires} on changed for each row"
            f" execute function pgqueue.enqueue_row({', '.join(given)})",
            "insert into changed values (1, 'a')",
        ]


BEFORE = """
    select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[20]), kind => 'a');
    select pgqueue.enqueue('r', group_key => 'g', unique_key => 'k', max_attempts => 1);
    select pgqueue.create_batch('q');
    select pgqueue.schedule('s', 'q', '@daily');
    create table changed (id int, t text);
    create function handle(payload jsonb) returns jsonb language sql as 'select payload';
    create function handle(job pgqueue.job) returns void language plpgsql as 'begin assert random() > 0.5; end';
    set statement_timeout = '60 s';
"""
AGAIN = "select id from pgqueue.claim_from('{q,r}', 'w', 5)"


@pytest.mark.timeout(4 * 3600 if LONG else 300)
def test_a_call_with_any_arguments_ends_soon_in_a_documented_way(template, role):
    fuzz = Fuzz(SEED)
    wrong: dict[tuple[str, str], str] = {}
    for _ in range(0, CALLS, EACH):
        # Else it would fill with settings and jobs that allow for less and less.
        with database(template) as dsn, psycopg.connect(dsn, autocommit=True) as db:
            db.execute(BEFORE)
            wrong = round_of_calls(db, fuzz) | wrong
    told = "\n".join(f"{name} {state}: {call}" for (name, state), call in wrong.items())
    assert not wrong, f"PGQUEUE_SEED={SEED}\n{told}"


def round_of_calls(db: psycopg.Connection, fuzz: Fuzz) -> dict[tuple[str, str], str]:
    every = functions(db)
    quick = [function for function in every if function.name not in SLOW]
    wrong = {}
    for n in range(EACH):
        if n % 50 == 0:
            db.execute(AGAIN)
        function = fuzz.random.choice(every if n % 50 == 0 else quick)
        statements = fuzz.call(function)
        try:
            in_transaction = db.transaction(
                force_rollback=function.name == "enqueue_row"
            )
            with nullcontext() if function.name == "work" else in_transaction:
                for statement in statements:
                    db.execute(statement)
        except psycopg.Error as error:
            state = error.sqlstate or "the session has ended"
            if state not in function.allowed:
                call = f"{'; '.join(statements)}\n    {error}\n    {error.diag.context}"
                wrong[function.name, state] = call
    return wrong
