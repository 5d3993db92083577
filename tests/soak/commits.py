"""What has committed, in the order in which it did: read from the server by logical decoding.

One line of JSON for each change, as the plugin test_decoding tells it. A transaction is read twice if the
server crashes after it was read, and is then left out the second time. parse() makes changes of it:
that is exact, where snapshots miss what is short.
"""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg

SLOT = "soak"
PEEK = """
select lsn::text, data
from pg_logical_slot_peek_changes(%s, null, 3000, 'include-timestamp', 'on', 'skip-empty-xacts', 'on')
"""
CHANGE = re.compile(r"table (\w+)\.(\w+): (\w+):(.*)", re.DOTALL)
COLUMN = re.compile(r" (\w+)\[((?:[^\[\]]|\[\])+)\]:('(?:[^']|'')*'|\S+)")
COMMIT = re.compile(r"COMMIT \d+ \(at (.*)\)")
INTERESTING = {"job", "dead_job", "batch", "effect", "step", "step_effect"}


class Reader:
    """Follows the log while an episode goes on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "commits"
        self.file = self.path.open("a")
        self.last = 0
        self.changes = 0
        self.lock = threading.Lock()

    def begin(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            create = "select pg_create_logical_replication_slot(%s, 'test_decoding')"
            conn.execute(create, [SLOT])
        # A promoted standby goes on from where it got to, and the old server may have gone further.
        self.last = 0

    def follow(self, dsn: str, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                with psycopg.connect(
                    dsn, autocommit=True, application_name="log"
                ) as conn:
                    self.read_all(conn)
            except psycopg.Error:
                pass
            stop.wait(0.3)

    def finish(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            self.read_all(conn)
            conn.execute("select pg_drop_replication_slot(%s)", [SLOT])

    def read_all(self, conn: psycopg.Connection) -> None:
        """Read until nothing comes, or only the last transaction again."""
        with self.lock:
            last = None
            while (lsn := self.read(conn)) != last:
                last = lsn

    def read(self, conn: psycopg.Connection) -> str | None:
        """Read on, and only then let the server forget it; say up to where."""
        rows = conn.execute(PEEK, [SLOT]).fetchall()
        transaction: list[str] = []
        for lsn, data in rows:
            transaction.append(data)
            if data.startswith("COMMIT"):
                high, low = (int(half, 16) for half in lsn.split("/"))
                if (at := high << 32 | low) > self.last:
                    self.last = at
                    self.file.write(json.dumps(transaction) + "\n")
                    self.changes += len(transaction)
                transaction = []
        self.file.flush()
        if not rows:
            return None
        conn.execute("select pg_replication_slot_advance(%s, %s)", [SLOT, lsn])
        return lsn


Row = dict[str, Any]


@dataclass
class Change:
    table: str
    what: str  # INSERT, UPDATE, DELETE or TRUNCATE
    row: Row


@dataclass
class Transaction:
    at: float
    changes: list[Change] = field(default_factory=list)


def parse(path: Path) -> Iterator[Transaction]:
    with path.open() as file:
        for line in file:
            said = json.loads(line)
            at = COMMIT.fullmatch(said[-1])
            assert at, said[-1]
            transaction = Transaction(moment(at[1]))
            for change in said[1:-1]:
                if parsed := parse_change(change):
                    transaction.changes.append(parsed)
            if transaction.changes:
                yield transaction


def parse_change(text: str) -> Change | None:
    change = CHANGE.fullmatch(text)
    if not change:
        return None
    table = "run" if change[2].startswith("run_") else change[2]
    if table != "run" and table not in INTERESTING:
        return None
    columns = COLUMN.findall(change[4])
    return Change(table, change[3], {n: value(t, v) for n, t, v in columns})


def value(type: str, text: str) -> Any:
    if text in ("null", "unchanged-toast-datum"):
        return None
    if text.startswith("'"):
        text = text[1:-1].replace("''", "'")
    if type in ("bigint", "integer", "smallint"):
        return int(text)
    if type == "timestamp with time zone":
        return moment(text)
    if type == "jsonb":
        return json.loads(text)
    return text


def moment(text: str) -> float:
    if text.endswith("infinity"):
        return float(text)
    return datetime.fromisoformat(text).timestamp()
