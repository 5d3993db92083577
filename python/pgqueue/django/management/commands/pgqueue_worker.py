"""manage.py pgqueue_worker: python -m pgqueue.worker, on the database of the settings."""

import argparse
import sys
from contextlib import suppress

from django.apps import apps
from django.conf import settings
from django.core.management.base import BaseCommand
from django.utils.module_loading import module_has_submodule

from pgqueue.app import App
from pgqueue.django.databases import conninfo
from pgqueue.django.middleware import fresh_connections
from pgqueue.worker.__main__ import main
from pgqueue.worker.options import import_module


class Command(BaseCommand):
    help = "Run the jobs of some queues; the options are those of python -m pgqueue.worker."

    def run_from_argv(self, argv: list[str]) -> None:
        parser = argparse.ArgumentParser(
            prog=f"manage.py {argv[1]}", add_help=False, allow_abbrev=False
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
        sys.exit(self.run(others, dsn))

    def run(self, argv: list[str], dsn: str) -> int:
        return main(argv, dsn, wrap=fresh_connections, discover=discover)

    def print_help(self, prog_name: str, subcommand: str) -> None:
        self.run_from_argv([prog_name, subcommand, "--help"])


def is_app(value: object) -> bool:
    with suppress(Exception):  # of a lazy object, which this makes
        return isinstance(value, App)
    return False


def discover() -> list[App]:
    """Import the module jobs of each installed app, and return the apps that are in them.

    Where there are tasks, they come along. Raises ValueError if there is neither.
    """
    modules = [
        import_module(f"{config.name}.jobs")
        for config in apps.get_app_configs()
        if module_has_submodule(config.module, "jobs")
    ]
    found = [v for m in modules for v in vars(m).values() if is_app(v)]
    if hasattr(settings, "TASKS"):
        # Only now: it finds the tasks of the installed apps.
        from pgqueue.django import worker

        worker.app.include(*found)
        return [worker.app]
    if not found:
        raise ValueError("no installed app has a pgqueue.App in its jobs.py: use --app")
    return found
