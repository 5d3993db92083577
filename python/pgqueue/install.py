"""Installs the SQL in a database: as an extension if the server has it, else by script."""

import importlib.resources
from pathlib import Path
from typing import Any

from psycopg.rows import tuple_row

AVAILABLE = (
    "select default_version from pg_catalog.pg_available_extensions"
    " where name operator(pg_catalog.=) 'pgqueue'"
)
INSTALLED = "select pg_catalog.to_regprocedure('pgqueue.version()') is not null"
LOCK = "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgqueue.install'))"
SOURCE = Path(__file__).parents[2] / "sql"  # in a clone: `make plain` writes it


def script() -> str:
    """Read the plain script that came with this package."""
    packaged = importlib.resources.files("pgqueue") / "pgqueue.sql"
    if packaged.is_file():
        return packaged.read_text()
    if found := sorted(SOURCE.glob("pgqueue--*.plain.sql")):
        return found[-1].read_text()
    raise FileNotFoundError("there is no script here: make plain writes it")


def install(conn: Any, plain: bool = False) -> str:
    """Install pgqueue unless it is installed, and return what was done as a sentence.

    `conn` is a psycopg 3 connection, also that of a migration; nothing here commits.
    `plain` runs the script even if the server has the extension. Raises psycopg's
    InsufficientPrivilege if the role may not create it, and FileNotFoundError in a clone
    without the script.
    """
    cursor = conn.cursor(row_factory=tuple_row)
    cursor.execute(LOCK)  # if two migrations run at once, the second finds it installed
    if cursor.execute(INSTALLED).fetchone() == (True,):
        (version,) = cursor.execute("select pgqueue.version()").fetchone()
        return f"pgqueue {version} is already installed"
    available = None if plain else cursor.execute(AVAILABLE).fetchone()
    if available:
        cursor.execute("create extension pgqueue")
        return f"created the extension pgqueue {available[0]}"
    body = script().replace("begin;\n", "", 1)
    cursor.execute(body.removesuffix("commit;\n").encode())
    return "ran the plain script: the server has no extension pgqueue"
