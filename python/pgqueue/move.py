"""The command move-groups: brings what belongs to a key to the shard that it belongs to.

The SQL module move says how a part gets from one shard to another, whatever dies meanwhile. The next call
finishes or forgets what was interrupted.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import psycopg

from pgqueue import database
from pgqueue.drivers import run_without_loop
from pgqueue.install import say_what_is_missing
from pgqueue.terminal import say

CHUNK = 200  # groups or keys in one transaction
SIZE = 30_000_000  # characters of JSON in one, but at least one group
LOCK = 7366517  # of a session: there is one such command at a time
PAUSE = 0.2  # seconds until busy groups are looked at again

MISPLACED = "select m.* from pgqueue._misplaced(%(place)s, %(shards)s) as m"
# As texts, because Python would not give back the numbers in them as they were.
DEPART = (
    "select d.state, d.parts::text, array(select array[p.what, p.key] from"
    " jsonb_to_recordset(d.parts) as p (what text, key text))"
    " from rows from (unnest(%(kinds)s::text[]), unnest(%(queues)s::text[]), unnest(%(keys)s::text[]))"
    " as a (kind, queue, key) cross join lateral pgqueue._depart(a.kind, a.queue, a.key) as d"
)
UNLOCK = "set local idle_in_transaction_session_timeout = '5 min'"  # if the other server hangs
EXPECT = "select pgqueue._expect(%(parts)s)"
EXPECTED = "select m.what, m.key from pgqueue.moving as m where m.content is not null"
ARRIVE = "select pgqueue._arrive(%(whats)s, %(keys)s)"
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
NUMBER = "select s.number, (s.of, s.above)::text from pgqueue.shard as s"
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
# From the old shard to the new one.
Way = tuple[database.Connection, database.Connection]


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
            tell(conn, ARRIVE, sorted(expected & gone))
            tell(conn, FORGET, sorted(expected - gone))
        for conn in self.conns:
            tell(conn, FORGET, ask(conn, GONE))

    def move_all(self) -> Counter[str]:
        """Move what can be moved now; count the rest, by reason."""
        left: Counter[str] = Counter()
        for place, source in enumerate(self.conns):
            to: defaultdict[int, list[Group]] = defaultdict(list)
            asked = {"place": place, "shards": len(self.conns)}
            for kind, queue, key, target in database.execute(source, MISPLACED, asked):
                to[target].append((kind, queue, key))
            for target, groups in to.items():
                left += self.move((source, self.conns[target]), groups)
        return left

    def resume(self) -> None:
        """Resume the new shards that are paused as a whole, except for what is paused on the old ones."""
        half = (len(self.conns) + 1) // 2
        for place, conn in enumerate(self.conns):
            if ask(conn, IS_PAUSED) != [(True,)]:
                continue
            if place < half:
                say(f"shard {place + 1} is paused, and stays so: it is an old one")
                continue
            pauses = ask(self.conns[place - half], PAUSES)
            with conn.transaction():
                conn.execute(f"set local {database.SEARCH_PATH}")
                conn.execute("select pgqueue.resume()")
                for function, *scope in pauses:
                    conn.execute(f"select pgqueue.{function}(%s, %s, %s)", scope)

    def move(self, way: Way, groups: list[Group]) -> Counter[str]:
        """Move some groups, as many at a time as one transaction can carry."""
        left: Counter[str] = Counter()
        most = CHUNK
        while groups:
            some = groups[:most]
            try:
                count, stayed = self._move(way, some)
            except psycopg.errors.ProgramLimitExceeded as error:
                if len(some) > 1:
                    most = len(some) // 2
                    continue
                kind, queue, key = some[0]
                say(f"{kind} {key!r} of queue {queue!r} is too large: {error}")
                count, stayed = 1, Counter(large=1)
            groups, most = groups[count:], CHUNK
            left += stayed
        return left

    def _move(self, way: Way, groups: list[Group]) -> tuple[int, Counter[str]]:
        """Move the first groups in three transactions, and pause those that are busy; return how many."""
        source, target = way
        kinds, queues, keys = (list(each) for each in zip(*groups, strict=True))
        asked = {"kinds": kinds, "queues": queues, "keys": keys}
        states, texts, names, size = list[str](), list[str](), list[Part](), 0
        with source.transaction():
            source.execute(f"set local {database.SEARCH_PATH}")
            source.execute(UNLOCK)
            with source.cursor("departing") as departing:
                departing.itersize = 10
                for state, text, parts in departing.execute(DEPART, asked):
                    size += len(text)
                    if size > SIZE and states:
                        break
                    states.append(state)
                    if state == "free" and parts:
                        texts.append(text[1:-1])
                        names += [(what, key) for what, key in parts]
            if names:
                coming = {"parts": f"[{','.join(texts)}]"}
                database.execute(target, EXPECT, coming)
                tell(source, "select pgqueue._departed(%(whats)s, %(keys)s)", names)
            for (kind, queue, key), state in zip(groups, states, strict=False):
                if kind == "group" and state != "free":
                    how = PAUSE_GROUP if state == "busy" else RESUME_GROUP
                    source.execute(how, (queue, key))
        tell(target, ARRIVE, names)
        tell(source, FORGET, names)
        self.moved += len(names)
        return len(states), Counter(state for state in states if state != "free")


def move_groups(dsns: Sequence[str], wait: float, resumes: bool) -> int:
    """Move until nothing is left or that many seconds are over; return the exit code."""
    with ExitStack() as stack:
        conns = [
            stack.enter_context(database.connect(database.conninfo(dsn)))
            for dsn in dsns
        ]
        if code := check(conns):
            return code
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
        try:
            left, moved = shards.move_all(), 0
            # Again, too, after a pass that has moved some: a dead job may have been redriven meanwhile.
            while (left or shards.moved > moved) and time.monotonic() < until:
                if left:
                    time.sleep(PAUSE)
                moved = shards.moved
                left = shards.move_all()
        finally:
            for conn in conns:
                with suppress(psycopg.Error):
                    tell(conn, "select pgqueue._resume_groups()")
        for conn in conns:
            tell(conn, FORGET, among)
        print(f"moved {shards.moved} jobs and schedules")
        if left:
            busy = left["busy"] + left["kept"]
            why = f"{busy} are busy, and {left['tied']} wait for other jobs or belong to batches"
            large = f", and {n} are too large" if (n := left["large"]) else ""
            say(f"not all groups and keys were moved: {why}{large}; call it again")
            return 1
        if resumes:
            shards.resume()
    return 0


def check(conns: Sequence[database.Connection]) -> int:
    """Raise unless these are all shards, in their order; or say what is missing, and return the exit code."""
    of = None
    for place, conn in enumerate(conns, 1):
        name = f"{conn.info.dbname} on {conn.info.host}"
        if run_without_loop(database.is_pooled(conn)):
            raise ValueError(f"{name} is behind a pooler: name the server itself")
        try:
            row = ask(conn, NUMBER)
        except (*database.INCOMPATIBLE, psycopg.errors.UndefinedTable) as error:
            return say_what_is_missing(conn, error)
        # Elsewhere ids may be the same, and all would go to the wrong places.
        number, own_of = row[0] if row else (None, None)
        of = of or own_of
        if number != place and len(conns) > 1:
            found = f"it is shard {number}" if row else "it is none"
            told = f"is named as shard {place}, and {found}: name all shards, in their order"
            raise ValueError(f"{name} {told}")
        if own_of != of:
            told = f"of and above are {own_of}, and {of} in the first shard: their ids may be the same"
            raise ValueError(f"{name}: {told}")
    return 0


def ask(conn: database.Connection, query: str) -> list[Any]:
    return database.execute(conn, query).fetchall()


def tell(conn: database.Connection, statement: str, names: Sequence[Part] = ()) -> None:
    """Run a statement about some parts in a transaction of its own."""
    whats, keys = [what for what, _ in names], [key for _, key in names]
    database.execute(conn, statement, {"whats": whats, "keys": keys})
