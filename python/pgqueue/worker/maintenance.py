"""Declares the app's schedules once, and calls pgqueue.maintain(), which may take a while, about once a minute."""

import random
from contextlib import suppress
from typing import Any

import psycopg

from pgqueue import database
from pgqueue.app import App
from pgqueue.database import Connection
from pgqueue.shards import shard_of
from pgqueue.task import Task
from pgqueue.terminal import ALLOWS
from pgqueue.worker.deadline import Server
from pgqueue.worker.seldom import log
from pgqueue.worker.service import Service

EVERY = 60.0  # seconds, give or take half
MAINTAIN = "select task, done from pgqueue.maintain()"
PRESENT = "select s.number, array(select r.name from pgqueue.schedule as r) from pgqueue.shard as s"


class Maintenance(Service):
    """Connects for each call: to keep a session for a second of work a minute would be a waste."""

    name = "maintenance"
    times = 10.0

    def __init__(
        self,
        server: Server,
        app: App,
        place: int = 0,
        count: int = 1,
        known: dict[int, tuple[int, frozenset[str]]] | None = None,
    ) -> None:
        """For the database at this place among so many.

        All note there their numbers as shards, 0 for none, and the names of their schedules.
        """
        super().__init__(server)
        self._app = app
        self._place, self._count = place, count
        self._known = {} if known is None else known
        self._looks = 0
        has_schedules = any(t.schedule is not None for t in app.tasks.values())
        self._is_declared = not has_schedules

    @property
    def has_declared(self) -> bool:
        """Whether the schedules are up to date, or have to wait for the end of an outage, here or elsewhere."""
        return self._is_declared or self._failures > 0 or self._looks > 3

    def is_needed(self) -> bool:
        pause = EVERY * random.uniform(0.5, 1.5)
        if not self._is_declared:  # another database has not answered yet
            tries = min(self._looks, 6)
            pause = min(pause, 0.05 * 4**tries) if tries else 0.0
        return not self.over.wait(pause)

    def _look(self, conn: Connection) -> bool:
        """Note what this database is; return whether it is clear where each schedule belongs."""
        if self._count > 1 and self._place not in self._known:
            number, names = 0, list[str]()
            # An older version has no such table, and a role may have rights only in the first.
            with suppress(
                psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege
            ):
                number, names = conn.execute(PRESENT).fetchone() or (0, [])
            self._known[self._place] = number, frozenset(names)
        self._looks += 1
        numbers = [number for number, _ in list(self._known.values())]
        return self._count in (1, len(numbers)) or 0 in numbers

    def _is_here(self, task: Task[Any, Any]) -> bool:
        """Whether to declare a task in this of several databases: each would run it as often."""
        known, count = dict(self._known), self._count
        numbers = sorted(number for number, _ in known.values())
        if count == 1 or numbers != list(range(1, count + 1)):
            return self._place == 0
        # Where it is, or else where move-groups would move it to.
        owners = [place for place, (_, names) in known.items() if task.kind in names]
        if owners:
            return self._place == min(owners)
        key = task.options["group_key"] or task.kind
        return shard_of(key, count) == known[self._place][0] - 1

    def work(self, conn: Connection) -> None:
        if not self._is_declared and self._look(conn):
            try:
                # A dispatcher may find handlers meanwhile.
                for task in list(self._app.tasks.values()):
                    if task.schedule is not None and self._is_here(task):
                        task.declare(conn)
            except psycopg.errors.InsufficientPrivilege as error:
                error.add_note(ALLOWS.format("scheduler"))
                raise
            self._is_declared = True
        try:
            # Not in a transaction: there it cannot empty the tables of old runs.
            rows = conn.execute(MAINTAIN).fetchall()
        except psycopg.errors.ActiveSqlTransaction:
            with database.transaction(conn):
                rows = conn.execute(MAINTAIN).fetchall()
        log.debug("maintained: %s", ", ".join(f"{task} {n}" for task, n in rows if n))
