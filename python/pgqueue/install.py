"""Installs and upgrades the SQL: as an extension if the server has it, else by script.

The SQL may be newer than this package, or older, as far back as OLDEST: `advice` says what to do.
"""

import contextlib
import importlib.resources
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from pgqueue.drivers import lent, of_psycopg
from pgqueue.terminal import explain, say, version

OLDEST = "0.2.0"  # the oldest SQL that this package works with
AVAILABLE = (
    "select default_version from pg_catalog.pg_available_extensions"
    " where name operator(pg_catalog.=) 'pgqueue'"
)
EXTENSION = (
    "select extversion from pg_catalog.pg_extension"
    " where extname operator(pg_catalog.=) 'pgqueue'"
)
# Read, and not called: whoever may create schemas may have made one of this name.
INSTALLED = (
    "select pg_catalog.substring(p.prosrc, '''([0-9.]+)''') from pg_catalog.pg_proc as p"
    " where p.oid operator(pg_catalog.=) pg_catalog.to_regprocedure('pgqueue.version()')"
)
# Of a schema that is no extension's, unless it is the caller.
OWNER = (
    "select pg_catalog.quote_ident(r.rolname) from pg_catalog.pg_namespace as n"
    " join pg_catalog.pg_roles as r on r.oid operator(pg_catalog.=) n.nspowner"
    " where n.nspname operator(pg_catalog.=) 'pgqueue'"
    " and r.rolname operator(pg_catalog.<>) current_user"
)
# Only a router has it.
ROUTER = "select pg_catalog.to_regprocedure('pgqueue.shards()')::pg_catalog.text"
VERSION = "select pgqueue.version()"
LOCK = "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgqueue.install'))"
SOURCE = Path(__file__).parents[2]  # in a clone: `make plain` writes the scripts


class TooOld(psycopg.errors.UndefinedFunction):
    """The SQL in the database is older than what this package works with."""


def number(text: str) -> tuple[int, ...]:
    """Read a version, to compare it; an empty tuple if it is not one."""
    return tuple(map(int, text.split("."))) if re.fullmatch(r"[\d.]*\d", text) else ()


def advice(installed: str) -> str | None:
    """Say what to do if the SQL is older than this package; raise TooOld if they do not work together."""
    if not number(installed) < number(version()):
        return None
    what = (
        f"the database has pgqueue {installed}, this package is of {version()}:"
        " alter extension pgqueue update, or python -m pgqueue upgrade"
    )
    if number(installed) < number(OLDEST):
        raise TooOld(what)
    return what


def say_what_is_missing(conn: psycopg.Connection[Any], error: psycopg.Error) -> int:
    """Say what a command needs in the database of this connection; return its exit code."""
    where = f"{conn.info.dbname} on {conn.info.host}"
    with contextlib.suppress(psycopg.Error):
        if found(conn, ROUTER):
            say(f"{where} is a router, ask a shard: {explain(error)}")
            return 3
    say(f"install or update the extension in {where}: {explain(error)}")
    try:
        installed = found(conn, INSTALLED)
        told = installed and advice(installed)
    except psycopg.Error as error:  # else it is not there, or not allowed
        told = str(error) if isinstance(error, TooOld) else None
    if told:
        say(told)
    return 3


def script(old: str | None = None) -> str:
    """Read the plain script that came with this package, or the one that upgrades `old`."""
    name = f"upgrades/{old}.sql" if old else "pgqueue.sql"
    packaged = importlib.resources.files("pgqueue") / name
    if packaged.is_file():
        return packaged.read_text()
    with contextlib.suppress(FileNotFoundError):
        control = (SOURCE / "pgqueue.control").read_text()
        (new,) = re.findall("default_version = '(.+)'", control)
        way = f"{old}--{new}" if old else new
        return (SOURCE / f"sql/pgqueue--{way}.plain.sql").read_text()
    raise FileNotFoundError("there is no script here: make plain writes it")


def run(cursor: Any, body: str) -> None:
    """Run a script within the caller's transaction, which keeps its search path."""
    path = found(cursor, "select pg_catalog.current_setting('search_path')")
    body = body.replace("begin;\n", "", 1)
    cursor.execute(body.removesuffix("commit;\n").encode())
    cursor.execute("select pg_catalog.set_config('search_path', %s, true)", [path])


def found(cursor: Any, query: str) -> str | None:
    row = cursor.execute(query).fetchone()
    return row[0] if row else None


@contextlib.contextmanager
def cursor_on(conn: Any) -> Iterator[psycopg.Cursor[tuple[Any, ...]]]:
    """Open a cursor that awaits nothing, also on what is async below SQLAlchemy."""
    own = of_psycopg(conn)
    if isinstance(own, psycopg.Connection):
        yield own.cursor(row_factory=tuple_row)
    else:
        with lent(own) as session:
            yield session.cursor(row_factory=tuple_row)


def install(conn: Any, plain: bool = False) -> str:
    """Install pgqueue unless it is installed, and return what was done as a sentence.

    `conn` is a connection of psycopg 3, or of Django or SQLAlchemy on it, also that of a
    migration; nothing here commits. `plain` runs the script even if the server has the
    extension. Raises psycopg's InsufficientPrivilege if the role may not create it, TypeError for
    a connection of another driver, and FileNotFoundError in a clone without the script.
    """
    with cursor_on(conn) as cursor:
        cursor.execute(LOCK)  # the second of two that run at once finds it installed
        available = found(cursor, AVAILABLE)
        if installed := found(cursor, INSTALLED):
            if found(cursor, EXTENSION):
                return already(installed, available or version())
            owner = found(cursor, OWNER)
            whose = f", by role {owner}" if owner else ""
            return already(installed, version(), whose)
        if available and not plain:
            cursor.execute("create extension pgqueue")
            return f"created the extension pgqueue {available}"
        run(cursor, script())
        why = "" if available else ": the server has no extension pgqueue"
        return f"ran the plain script{why}"


def already(installed: str, offered: str, whose: str = "") -> str:
    said = f"pgqueue {installed} is already installed{whose}"
    if not number(offered) or installed == offered:
        return said
    if number(installed) > number(offered):
        return f"{said}, newer than {offered}: there is no way back"
    return f"{said}: python -m pgqueue upgrade makes it {offered}"


def upgrade(conn: Any) -> str:
    """Upgrade pgqueue as far as the server's files or this package go; return what was done.

    In a migration, like `install`, it keeps its locks until that commits. Raises ValueError if
    pgqueue is not installed, or newer; FileNotFoundError if no script upgrades its version.
    """
    with cursor_on(conn) as cursor:
        cursor.execute(LOCK)
        old = found(cursor, INSTALLED)
        if old is None:
            raise ValueError("pgqueue is not installed: python -m pgqueue install")
        is_extension = found(cursor, EXTENSION) is not None
        new = str(found(cursor, AVAILABLE)) if is_extension else version()
        if old == new:
            return already(old, new)
        if number(old) > number(new):
            raise ValueError(already(old, new))
        if is_extension:
            cursor.execute("alter extension pgqueue update")
        else:
            run(cursor, script(old))
        return f"upgraded pgqueue from {old} to {found(cursor, INSTALLED)}"


def upgrade_beside_others(conn: Any, patience: float = 60.0) -> str:
    """Upgrade on a connection in autocommit, trying again while others hold locks.

    It gives up waiting before Postgres looks for a deadlock, so that no call of theirs fails.
    """
    until = time.monotonic() + patience
    while True:
        try:
            with conn.transaction():
                conn.execute("set local lock_timeout = '300ms'")
                return upgrade(conn)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if time.monotonic() > until:
                raise
        time.sleep(random.uniform(0.0, 0.2))
