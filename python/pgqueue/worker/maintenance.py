"""Declares the app's schedules once, and calls pgqueue.maintain(), which may take a while, about once a minute."""

import random

import psycopg

from pgqueue import database
from pgqueue.app import App
from pgqueue.database import Connection
from pgqueue.terminal import ALLOWS
from pgqueue.worker.deadline import Server
from pgqueue.worker.seldom import log
from pgqueue.worker.service import Service

EVERY = 60.0  # seconds, give or take half
MAINTAIN = "select task, done from pgqueue.maintain()"


class Maintenance(Service):
    """Connects for each call: to keep a session for a second of work a minute would be a waste."""

    name = "maintenance"
    times = 10.0

    def __init__(self, server: Server, app: App, declares: bool) -> None:
        super().__init__(server)
        self._app = app
        has_schedules = any(t.schedule is not None for t in app.tasks.values())
        self._is_declared = not (declares and has_schedules)

    @property
    def has_declared(self) -> bool:
        """Whether the schedules are up to date, or have to wait for the end of an outage."""
        return self._is_declared or self._failures > 0

    def is_needed(self) -> bool:
        pause = EVERY * random.uniform(0.5, 1.5) if self._is_declared else 0.0
        return not self.over.wait(pause)

    def work(self, conn: Connection) -> None:
        if not self._is_declared:
            try:
                # A dispatcher may find handlers meanwhile.
                for task in list(self._app.tasks.values()):
                    if task.schedule is not None:
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
