"""The databases of Django's settings, as libpq knows them."""

import re

from django.db import connections
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from pgqueue.database import pinned

PLACE = ("service", "host", "hostaddr", "port", "dbname")  # whoever connects


def conninfo(alias: str) -> str:
    """Write what Django connects with, as far as libpq knows it."""
    if alias not in connections:
        raise ValueError(f"the settings have no database {alias!r}")
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ValueError(f"the database {alias!r} is not PostgreSQL")
    given = connection.get_connection_params()
    if role := connection.settings_dict["OPTIONS"].get("assume_role"):
        escaped = re.sub(r"([\\\s])", r"\\\1", role)
        given["options"] = f"{given.get('options', '')} -c role={escaped}"
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    return make_conninfo(**{k: v for k, v in given.items() if k in known})


def place(dsn: str) -> tuple[object, ...]:
    """Say where a database is: two are the same one if this is."""
    given = conninfo_to_dict(pinned(dsn))
    return tuple(given.get(name) for name in PLACE)
