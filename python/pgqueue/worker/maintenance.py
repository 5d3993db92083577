"""Calls pgqueue.maintain() about once a minute; it may take a while, so apart."""

import logging
import random

from pgqueue import database
from pgqueue.worker.service import Service

log = logging.getLogger("pgqueue")

EVERY = 60.0  # seconds, give or take half


class Maintenance(Service):
    """Connects for each call: a session for a second of work a minute would be a waste."""

    name = "maintenance"

    def pause(self) -> float:
        return EVERY * random.uniform(0.5, 1.5)

    def work(self, conn: database.Connection) -> None:
        with database.transaction(conn):
            rows = conn.execute("select task, done from pgqueue.maintain()").fetchall()
        log.debug("maintained: %s", ", ".join(f"{task} {n}" for task, n in rows if n))
