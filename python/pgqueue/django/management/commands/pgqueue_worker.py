"""manage.py pgqueue_worker: python -m pgqueue.worker, on the database of the settings."""

import argparse
import sys

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import connections
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo

from pgqueue.django.middleware import fresh_connections
from pgqueue.worker.__main__ import main
from pgqueue.worker.options import add


class Command(BaseCommand):
    help = "Run the jobs of some queues; the options are those of python -m pgqueue.worker."

    def run_from_argv(self, argv: list[str]) -> None:
        parser = argparse.ArgumentParser(
            prog="manage.py pgqueue_worker", add_help=False, allow_abbrev=False
        )
        parser.add_argument("--database", default="default", metavar="ALIAS")
        # Django has read these.
        parser.add_argument("--settings")
        parser.add_argument("--pythonpath")
        args, others = parser.parse_known_args(argv[2:])
        if {"-h", "--help"} & set(others):
            parser.print_usage()
        try:
            dsn = conninfo(args.database)
        except ValueError as error:
            parser.error(str(error))
        if not names_app(others) and hasattr(settings, "TASKS"):
            others = ["--app", "pgqueue.django.worker", *others]
        sys.exit(main(others, dsn=dsn, wrap=fresh_connections))

    def print_help(self, prog_name: str, subcommand: str) -> None:
        self.run_from_argv([prog_name, subcommand, "--help"])


def names_app(argv: list[str]) -> bool:
    """Whether the command line or its variable names an app."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add(parser, "--app", "", None, str)
    return bool(parser.parse_known_args(argv)[0].app)


def conninfo(alias: str) -> str:
    """Write what Django connects with, as far as libpq knows it."""
    if alias not in connections:
        raise ValueError(f"the settings have no database {alias!r}")
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ValueError(f"the database {alias!r} is not PostgreSQL")
    given = connection.get_connection_params()
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    return make_conninfo(**{k: v for k, v in given.items() if k in known})
