"""Connections of the worker and the command line: their address, settings and errors.

No statement of this package may run what a stranger has created in a schema of the search
path. Statements sent on somebody else's connection, or behind a pooler, qualify each
function, operator and type: `a operator(pg_catalog.=) b`. So do the worker's, although its
own sessions pin the path as well. All others go through `execute`.
"""

import os
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow

from pgqueue.drivers import settled

Connection = psycopg.Connection[TupleRow]

# A broken network is noticed within 15 seconds: by keepalives on an idle connection, by
# tcp_user_timeout while something is being sent.
PATIENCE = {
    "connect_timeout": 10,
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 8_000,
    "application_name": "pgqueue",
}
ADDRESS = ("host", "hostaddr", "port", "dbname", "user")  # a password may change
ENVIRONMENT = {
    "PGCONNECT_TIMEOUT": "connect_timeout",
    "PGAPPNAME": "application_name",
    "PGTARGETSESSIONATTRS": "target_session_attrs",
}

BACKEND = "select pg_catalog.pg_backend_pid()"
READ_COMMITTED = psycopg.IsolationLevel.READ_COMMITTED
SEARCH_PATH = "search_path = pg_catalog, pg_temp"
# Where the server's system can tell: what was given up need not wait for a lock any more.
CHECK_CLIENT = "set client_connection_check_interval = '2 s'"

# What waiting cannot fix: no such schema, or other functions in it.
INCOMPATIBLE = (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction)
# Errors of a call during which an upgrade replaces what it calls: the next call does not get them.
REPLACED = (
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.DatatypeMismatch,
    psycopg.errors.FeatureNotSupported,  # a prepared statement has another result
)
# SQLSTATEs, or classes of them, that may soon pass: connection, rollback, resources,
# operator, system, internal; read-only (a standby), lock not available.
OUTAGES = ("08", "40", "53", "57", "58", "XX", "25006", "25P03", "25P04", "55P03")


# libpq passes on the message of a refused connection, but not its SQLSTATE: 3D000, 28xxx or 42501.
# In another language it counts as an outage. The last line is what libpq itself refuses.
REFUSED = re.compile(
    r'FATAL: +(?:(?:database|role) ".*" does not exist|no such database|no pg_hba\.conf entry'
    r"|pg_hba\.conf rejects|.*authentication failed|role .* is not permitted to log in"
    r"|permission denied for database|invalid value for parameter|unrecognized configuration)"
    r"|^(?:connection is bad: )?(?:invalid .*(?:value|port number)|could not match \d|definition of)"
)


def is_refused(error: psycopg.Error) -> bool:
    """Whether the server is up, but refuses the database, role or password, or an option is wrong."""
    return error.sqlstate is None and REFUSED.search(str(error)) is not None


def is_outage(error: psycopg.Error) -> bool:
    """Whether to try again; an error without a SQLSTATE is a broken connection.

    A plain DatabaseError is libpq's, for an answer that no server gives, but a proxy may.
    """
    if error.sqlstate is None:
        broken = psycopg.OperationalError | psycopg.InterfaceError
        return isinstance(error, broken) or type(error) is psycopg.DatabaseError
    return error.sqlstate.startswith(OUTAGES)


def several(dsn: str) -> list[str]:
    """Split a list: by semicolons or line ends, and before a URI by white space or commas, too."""
    between = r"[;\s,]+(?=postgres(?:ql)?(?:\+\w+)?://)|[;\n]\s*(?=\w+\s*=|$)"
    return [part.strip() for part in re.split(between, dsn) if part.strip()] or [""]


def conninfos(dsn: str | Sequence[str] | None, name: str = "pgqueue") -> list[str]:
    """Complete each dsn of a list or, without one, those that the environment names."""
    given = [dsn] if isinstance(dsn, str) else list(dsn or [])
    if not any(given):
        given = several(
            os.environ.get("PGQUEUE_DSN") or os.environ.get("DATABASE_URL") or ""
        )
    return list(dict.fromkeys(conninfo(one, name=name) for one in given))


def conninfo(
    dsn: str | None, environ: Mapping[str, str] = os.environ, name: str = "pgqueue"
) -> str:
    """Complete a dsn by PGQUEUE_DSN, DATABASE_URL or libpq's variables, and by PATIENCE.

    The sessions get this name unless they have one; Postgres keeps 63 bytes of it. Raises
    psycopg.ProgrammingError for one that libpq does not understand.
    """
    dsn = dsn or environ.get("PGQUEUE_DSN") or environ.get("DATABASE_URL") or ""
    dsn = re.sub(r"^postgres(ql)?\+\w+:", "postgresql:", dsn)  # as SQLAlchemy writes it
    uri = re.match(r"([\w+.-]+)://", dsn)
    if uri and uri[1] not in ("postgresql", "postgres"):
        raise psycopg.ProgrammingError(f"not {uri[1]}:// but postgresql:// is needed")
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        said = str(error)
        # Whatever else libpq quotes may be the password, or have it in it.
        if not said.startswith(("invalid connection option", "invalid URI query")):
            said = re.sub('".*"', '"…"', said.replace('"="', "="), flags=re.S)
        raise psycopg.ProgrammingError(said) from None
    wanted: dict[str, Any] = {**PATIENCE, "application_name": name}
    for where, variable in ("host", "PGHOST"), ("hostaddr", "PGHOSTADDR"):
        if "," in str(given.get(where) or environ.get(variable)):
            wanted["target_session_attrs"] = "read-write"
    for variable, ours in ENVIRONMENT.items():  # what it says comes first, too
        if variable in environ:
            wanted.pop(ours, None)
    # Others lack characters that a payload may have.
    return make_conninfo(**{**wanted, **given, "client_encoding": "utf8"})


def name(dsn: str) -> str:
    """Name a database, as dbname@host:port, without the parts that are left to libpq."""
    given = conninfo_to_dict(dsn)
    host, port = given.get("host") or given.get("hostaddr"), given.get("port")
    at = f"@{host}" if host else ""
    return f"{given.get('dbname') or ''}{at}{f':{port}' if port else ''}"


def pinned(dsn: str) -> str:
    """Complete a dsn by what libpq's variables now say of the address.

    A handler may change them, for a pg_dump of another database. Reports sent there would end
    other jobs, which have the same ids and tokens.
    """
    given: dict[str, Any] = conninfo_to_dict(dsn)
    if "service" in given:  # which comes before them
        return dsn
    for option in pq.Conninfo.get_defaults():
        keyword = option.keyword.decode()
        if keyword in ADDRESS:
            with suppress(UnicodeDecodeError):  # libpq takes any bytes
                given.setdefault(keyword, (option.val or b"").decode())
    return make_conninfo(**given)


async def set_up(conn: Any) -> None:
    """Set READ COMMITTED and, unless behind a pooler, have all statements prepared."""
    await settled(conn.set_isolation_level(READ_COMMITTED))
    conn.prepare_threshold = None
    if not await is_pooled(conn):
        # Compiling a plan takes longer than any of our statements. A short timeout might cancel
        # the same call again and again; a long one is what a worker's deadlines are for.
        settings = (
            f"set statement_timeout = 0; set {SEARCH_PATH}; set jit = off;"
            " set idle_session_timeout = 0;"
            " set default_transaction_isolation = 'read committed'"
        )
        if conn.info.server_version >= 170000:
            settings = f"set transaction_timeout = 0; {settings}"
        await settled(conn.execute(settings))
        with suppress(psycopg.errors.InvalidParameterValue):
            await settled(conn.execute(CHECK_CLIENT))
        conn.prepare_threshold = 0


def transaction(conn: Any) -> Any:
    """Ensure READ COMMITTED: behind a pooler it cannot be set for the session."""
    return conn.transaction() if conn.prepare_threshold is None else nullcontext()


def connect(conninfo: str) -> Connection:
    """Connect for a command, also through a pooler."""
    return psycopg.connect(conninfo, autocommit=True, prepare_threshold=None)


def execute(
    conn: Connection, query: str, params: Mapping[str, Any] | None = None
) -> psycopg.Cursor[TupleRow]:
    """Run a statement in a transaction of its own, with a search path that is safe."""
    with conn.transaction():
        # psycopg reads intervals in no other style.
        conn.execute(f"set local {SEARCH_PATH}; set local intervalstyle = postgres")
        return conn.execute(query, params)


async def is_pooled(conn: Any) -> bool:
    """Whether a pooler answers: it does not reveal the backend's process id."""
    cursor = await settled(conn.execute(BACKEND))
    found: bool = await settled(cursor.fetchone()) != (conn.info.backend_pid,)
    return found


def backoff(failures: int) -> float:
    """Return how many seconds to wait after this many failures in a row: 30 at most."""
    return min(30.0, 0.1 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)
