"""Django: `INSTALLED_APPS += ["pgqueue.django"]` gives `manage.py pgqueue_worker`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the backend of TASKS only where it is named: it needs Django 6 or django-tasks."""
    if name != "PgQueueBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pgqueue.django.backend import PgQueueBackend

    return PgQueueBackend
