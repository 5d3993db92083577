"""A session that does at random what it can, alone or in a transaction, and writes down what came of it."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from soak.history import Entry, History

# Who is cut off, or finds the server starting or stopping.
CUT = {None, "57P01", "57P02", "57P03", "08006", "08001", "53300"}
# What another has just done to the same job or batch; a lease that has expired; a cancelled statement;
# 40001 in a REPEATABLE READ transaction; 42704 if the watcher has ended what this session has prepared.
MET = {"PQ001", "PQ002", "55000", "23505", "57014", "40001", "42704"}


class Phase:
    """What the clients of an episode are to do now."""

    def __init__(self) -> None:
        self.is_calm = threading.Event()  # work off what there is
        self.is_over = threading.Event()


class Client:
    """Subclasses name their acts, and how likely each is."""

    may_fail_with = MET
    pause = 0.0
    options = ""

    def __init__(self, dsn: str, history: History, phase: Phase, seed: str) -> None:
        self.dsn, self.history, self.phase = dsn, history, phase
        self.rng = random.Random(seed)
        self.conn: psycopg.Connection | None = None
        self.entries: list[Entry] = []
        self.is_open = False
        self.has_two_phases = False
        self.is_prepared = False

    def acts(self) -> dict[Callable[[], None], float]:
        raise NotImplementedError

    def run(self) -> None:
        while not self.is_done():
            if not self.connect():
                continue
            try:
                self.step()
            except psycopg.Error as error:
                # What is prepared may be committed by another.
                is_unknown = error.sqlstate in CUT or self.is_prepared
                self.end("unknown" if is_unknown else "fail", error)
            else:
                self.end("ok")
            if self.pause:
                time.sleep(self.rng.uniform(0, 2 * self.pause))
        if self.conn:
            self.conn.close()

    def is_done(self) -> bool:
        return self.phase.is_calm.is_set()

    def connect(self) -> bool:
        if self.conn and not self.conn.closed:
            return True
        try:
            self.conn = psycopg.connect(
                self.dsn,
                autocommit=True,
                application_name="soak",
                connect_timeout=5,
                options=f"-c statement_timeout=20s -c timezone=UTC {self.options}",
                prepare_threshold=None,
            )
        except psycopg.Error:
            time.sleep(0.05)
            return False
        return True

    def step(self) -> None:
        """One act, or a few in one transaction."""
        acts = self.acts()
        chosen = self.rng.choices(
            list(acts), list(acts.values()), k=self.rng.choice([1, 1, 1, 2, 3])
        )
        if len(chosen) == 1 and self.rng.random() < 0.5:
            chosen[0]()
        else:
            self.transact(chosen)

    def transact(self, acts: list[Callable[[], None]]) -> None:
        self.begin()
        for act in acts:
            if self.rng.random() < 0.1:
                self.undo(act)
            act()
            self.dawdle()
        self.conclude()

    def begin(self) -> None:
        self.conn.execute("begin")
        self.is_open = True
        self.has_two_phases = self.rng.random() < 0.07
        if self.has_two_phases:
            self.conn.execute("set local pgqueue.notify = off")

    def conclude(self) -> None:
        """Commit, in one phase or in two, or roll back."""
        prepared = ""
        if self.has_two_phases:
            name = f"'{self.history.who} {time.time()}'"
            self.conn.execute(f"prepare transaction {name}")
            self.is_prepared = True
            self.note("prepare")
            prepared = f"prepared {name}"
            self.dawdle()
        if self.rng.random() < 0.12:
            self.conn.execute(f"rollback {prepared}")
            self.settle("fail")
        else:
            self.conn.execute(f"commit {prepared}")
        self.is_open = self.is_prepared = False

    def undo(self, act: Callable[[], None]) -> None:
        """Do it, and roll back to before it."""
        before = len(self.entries)
        self.conn.execute("savepoint undone")
        try:
            act()
        except psycopg.Error as error:
            if error.sqlstate not in self.may_fail_with:
                raise
        self.conn.execute("rollback to undone")
        for entry in self.entries[before:]:
            entry["end"] = "fail"
            entry["end_at"] = time.time()

    def dawdle(self) -> None:
        """Keep the transaction open, often enough."""
        if self.rng.random() < 0.25:
            time.sleep(self.rng.choice([0, 0.001, 0.005, 0.02]))

    def call(self, what: str, query: str, given: Any = (), **facts: Any) -> list[tuple]:
        entry = self.note(what, **facts)
        rows = self.conn.execute(query, given).fetchall()
        entry["rows"] = [list(row) for row in rows]
        if not self.is_open:
            entry["end"] = "ok"
            entry["end_at"] = time.time()
        return rows

    def note(self, what: str, **facts: Any) -> Entry:
        entry: Entry = {"do": what, "start": time.time(), "end": "open", **facts}
        self.entries.append(entry)
        return entry

    def look(self, query: str, given: Any = ()) -> list:
        """What is there, for the choice of what to do."""
        return [row[0] for row in self.conn.execute(query, given)]

    def some(self, query: str, most: int = 1) -> list:
        found = self.look(query)
        return self.rng.sample(found, min(most, len(found)))

    def end(self, how: str, error: psycopg.Error | None = None) -> None:
        if error is not None:
            # What is cancelled is cancelled by the nemesis, and nothing takes so long.
            if (
                error.sqlstate not in self.may_fail_with | CUT
                or "statement timeout" in str(error)
            ):
                note = {"error": error.sqlstate, "text": str(error)}
                refused = {"do": "refused", "start": time.time(), "end": "fail"}
                self.history.write([refused | note])
            # An error takes all of the transaction with it, and nothing of what was done before one.
            if self.entries:
                self.entries[-1]["error"] = error.sqlstate
            self.settle(how)
            if how == "unknown" and self.conn:
                self.conn.close()
            elif self.is_open:
                try:
                    self.conn.execute("rollback")
                except psycopg.Error:
                    self.conn.close()
        else:
            self.settle("ok")
        self.is_open = self.is_prepared = False
        self.history.write(self.entries)
        self.entries = []

    def settle(self, how: str) -> None:
        for entry in self.entries:
            if entry["end"] == "open":
                entry["end"] = how
                entry["end_at"] = time.time()
