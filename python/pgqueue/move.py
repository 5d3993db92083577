"""The command move-groups: brings what belongs to a key to the shard that it belongs to.

The SQL module move says how a part gets from one shard to another, whatever dies meanwhile. The next call
finishes or forgets what was interrupted.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pgqueue import database
from pgqueue.install import say_what_is_missing
from pgqueue.terminal import say

CHUNK = 200  # groups or keys in one transaction
LOCK = 7366517  # of a session: there is one such command at a time
PAUSE = 0.2  # seconds until busy groups are looked at again

MISPLACED = "select m.* from pgqueue._misplaced(%(place)s, %(shards)s) as m"
DEPART = (
    "select a.kind, a.queue, a.key, d.state, d.parts"
    " from rows from (unnest(%(kinds)s::text[]), unnest(%(queues)s::text[]), unnest(%(keys)s::text[]))"
    " as a (kind, queue, key) cross join lateral pgqueue._depart(a.kind, a.queue, a.key) as d"
)
EXPECTED = "select m.what, m.key from pgqueue.moving as m where m.content is not null"
GONE = (
    "select m.what, m.key from pgqueue.moving as m"
    " where m.content is null and m.what not in ('paused', 'shards')"
)
# A busy group is paused: its jobs end soon. If jobs that have yet to run keep a group, it is resumed.
PAUSE_GROUP = "select pgqueue._pause_group(%s, %s)"
RESUME_GROUP = "select pgqueue._resume_groups(%s, %s)"
FORGET = "delete from pgqueue.moving as m where (m.what, m.key) in (select * from unnest(%(whats)s::text[], %(keys)s::text[]))"
# Among how many: with fewer it would seem that what has left one has arrived, or that it has not left.
BEGIN = (
    "insert into pgqueue.moving (what, key)"
    " select * from unnest(%(whats)s::text[], %(keys)s::text[]) on conflict do nothing"
)
BEGUN = "select m.key::int from pgqueue.moving as m where m.what = 'shards'"
NUMBER = "select s.number from pgqueue.shard as s"
IS_PAUSED = (
    "select exists (select from pgqueue.queue as q"
    " where q.paused and (q.name, q.kind, q.group_key) = ('', '', ''))"
)
# The wider ones first: pause and resume override what is narrower.
PAUSES = (
    "select case when q.paused then 'pause' else 'resume' end,"
    " nullif(q.name, ''), nullif(q.kind, ''), nullif(q.group_key, '')"
    " from pgqueue.queue as q where q.paused is not null"
    " order by num_nonnulls(nullif(q.name, ''), nullif(q.kind, ''), nullif(q.group_key, ''))"
)
Part = tuple[str, str]
Group = tuple[str, str, str]  # kind, queue, key


class Shards:
    """Connections to all shards, in the order of their numbers."""

    def __init__(self, conns: Sequence[database.Connection]) -> None:
        self.conns = conns
        self.moved = 0

    def finish_what_was_cut_off(self) -> None:
        """Let what has left its old shard arrive at the new one, and forget the rest."""
        gone = {part for conn in self.conns for part in ask(conn, GONE)}
        for conn in self.conns:
            expected = set(ask(conn, EXPECTED))
            self.arrive(conn, sorted(expected & gone))
            tell(conn, FORGET, sorted(expected - gone))
        for conn in self.conns:
            tell(conn, FORGET, ask(conn, GONE))

    def arrive(self, conn: database.Connection, parts: list[Part]) -> None:
        if parts:
            tell(conn, "select pgqueue._arrive(%(whats)s, %(keys)s)", parts)

    def move_all(self) -> Counter[str]:
        """Move what can be moved now; count the rest, by reason."""
        left: Counter[str] = Counter()
        for place, source in enumerate(self.conns):
            to: defaultdict[int, list[Group]] = defaultdict(list)
            asked = {"place": place, "shards": len(self.conns)}
            for kind, queue, key, target in database.execute(source, MISPLACED, asked):
                to[target].append((kind, queue, key))
            for target, groups in to.items():
                for start in range(0, len(groups), CHUNK):
                    chunk = groups[start : start + CHUNK]
                    left += self.move(source, self.conns[target], chunk)
        return left

    def resume(self) -> None:
        """Resume the shards that are paused as a whole, except for what is paused on the others."""
        waiting = [conn for conn in self.conns if ask(conn, IS_PAUSED) == [(True,)]]
        others = [conn for conn in self.conns if conn not in waiting]
        for conn in waiting:
            # What came to it was on the one as many places before it.
            place = self.conns.index(conn)
            pauses = ask(others[place % len(others)], PAUSES) if others else []
            with conn.transaction():
                conn.execute(f"set local {database.SEARCH_PATH}")
                conn.execute("select pgqueue.resume()")
                for function, *scope in pauses:
                    conn.execute(f"select pgqueue.{function}(%s, %s, %s)", scope)

    def move(
        self,
        source: database.Connection,
        target: database.Connection,
        groups: list[Group],
    ) -> Counter[str]:
        """Move some groups in three transactions, or half of them at a time if that is too much."""
        try:
            return self._move(source, target, groups)
        except psycopg.errors.ProgramLimitExceeded:
            if len(groups) == 1:
                raise
        half = len(groups) // 2
        moved = self.move(source, target, groups[:half])
        return moved + self.move(source, target, groups[half:])

    def _move(
        self,
        source: database.Connection,
        target: database.Connection,
        groups: list[Group],
    ) -> Counter[str]:
        """Move some groups in three transactions; pause those that are busy."""
        kinds, queues, keys = (list(each) for each in zip(*groups, strict=True))
        asked = {"kinds": kinds, "queues": queues, "keys": keys}
        with source.transaction():
            source.execute(f"set local {database.SEARCH_PATH}")
            found = source.execute(DEPART, asked).fetchall()
            parts = [p for *_, state, some in found if state == "free" for p in some]
            if parts:
                gone = {"parts": Jsonb(parts)}
                database.execute(target, "select pgqueue._expect(%(parts)s)", gone)
                source.execute("select pgqueue._departed(%(parts)s)", gone)
            for kind, queue, key, state, _ in found:
                if kind == "group" and state != "free":
                    how = PAUSE_GROUP if state == "busy" else RESUME_GROUP
                    source.execute(how, (queue, key))
        names = [(part["what"], part["key"]) for part in parts]
        self.arrive(target, names)
        tell(source, FORGET, names)
        self.moved += len(parts)
        return Counter(state for *_, state, _ in found if state != "free")


def move_groups(dsns: Sequence[str], wait: float, resumes: bool) -> int:
    """Move until nothing is left or that many seconds are over; return the exit code."""
    with ExitStack() as stack:
        conns = [
            stack.enter_context(database.connect(database.conninfo(dsn)))
            for dsn in dsns
        ]
        for place, conn in enumerate(conns, 1):
            try:
                number = ask(conn, NUMBER)
            except (*database.INCOMPATIBLE, psycopg.errors.UndefinedTable) as error:
                return say_what_is_missing(conn, error)
            # Elsewhere ids may be the same, and all would go to the wrong places.
            if number != [(place,)] and len(conns) > 1:
                told = f"it is shard {number[0][0]}" if number else "it is none"
                raise ValueError(
                    f"{conn.info.dbname} on {conn.info.host} is named as shard {place},"
                    f" and {told}: name all shards, in their order"
                )
        shards, until = Shards(conns), time.monotonic() + wait
        for conn in conns:
            # The session of a command that was killed ends with its statement.
            while ask(conn, f"select pg_try_advisory_lock({LOCK})") != [(True,)]:
                if time.monotonic() > until:
                    raise ValueError("another move-groups is running")
                time.sleep(PAUSE)
        for count in {count for conn in conns for (count,) in ask(conn, BEGUN)}:
            if count != len(conns):
                told = f"a move-groups among {count} shards was cut off: name these"
                raise ValueError(f"{told}, to finish it first")
        shards.finish_what_was_cut_off()
        among = [("shards", str(len(conns)))]
        for conn in conns:
            tell(conn, BEGIN, among)
        left, moved = shards.move_all(), 0
        # Again, too, after a pass that has moved some: a dead job may have been redriven meanwhile.
        while (left or shards.moved > moved) and time.monotonic() < until:
            if left:
                time.sleep(PAUSE)
            moved = shards.moved
            left = shards.move_all()
        for conn in conns:
            tell(conn, "select pgqueue._resume_groups()")
        for conn in conns:
            tell(conn, FORGET, among)
        print(f"moved {shards.moved} jobs and schedules")
        if left:
            busy = left["busy"] + left["kept"]
            why = f"{busy} are busy, and {left['tied']} wait for other jobs or belong to batches"
            say(f"not all groups and keys were moved: {why}; call it again")
            return 1
        if resumes:
            shards.resume()
    return 0


def ask(conn: database.Connection, query: str) -> list[Any]:
    return database.execute(conn, query).fetchall()


def tell(conn: database.Connection, statement: str, names: Sequence[Part] = ()) -> None:
    """Run a statement about some parts in a transaction of its own."""
    whats, keys = [what for what, _ in names], [key for _, key in names]
    database.execute(conn, statement, {"whats": whats, "keys": keys})
