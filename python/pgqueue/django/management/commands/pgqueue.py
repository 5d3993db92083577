"""manage.py pgqueue: python -m pgqueue, on the database of the settings."""

from pgqueue.__main__ import main
from pgqueue.django.management.commands import pgqueue_worker


class Command(pgqueue_worker.Command):
    help = (
        "Enqueue jobs and manage queues; the commands are those of python -m pgqueue."
    )

    def run(self, argv: list[str], dsn: str) -> int:
        return main(argv, dsn)
