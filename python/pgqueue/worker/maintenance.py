"""Declares the app's schedules once, and calls pgqueue.maintain(), which may take a while, about once a minute."""

import random
from collections.abc import Callable
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
NUMBER = "select s.number from pgqueue.shard as s"


class Maintenance(Service):
    """Connects for each call: to keep a session for a second of work a minute would be a waste."""

    name = "maintenance"
    times = 10.0

    def __init__(self, server: Server, app: App, place: int, count: int) -> None:
        """For the database at this place among so many."""
        super().__init__(server)
        self._app = app
        self._place, self._count = place, count
        has_schedules = any(t.schedule is not None for t in app.tasks.values())
        self._is_declared = not has_schedules

    @property
    def has_declared(self) -> bool:
        """Whether the schedules are up to date, or have to wait for the end of an outage."""
        return self._is_declared or self._failures > 0

    def is_needed(self) -> bool:
        pause = EVERY * random.uniform(0.5, 1.5) if self._is_declared else 0.0
        return not self.over.wait(pause)

    def _rule(self, conn: Connection) -> Callable[[Task[Any, Any]], bool]:
        """Say which of several databases declares a task: each would run it as often."""
        row = conn.execute(NUMBER).fetchone() if self._count > 1 else None
        if row is None:
            return lambda task: self._place == 0
        number, count = row[0], self._count
        # Where move-groups would move it to.
        return lambda task: (
            shard_of(task.options["group_key"] or task.kind, count) == number - 1
        )

    def work(self, conn: Connection) -> None:
        if not self._is_declared:
            try:
                is_here = self._rule(conn)
                # A dispatcher may find handlers meanwhile.
                for task in list(self._app.tasks.values()):
                    if task.schedule is not None and is_here(task):
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
