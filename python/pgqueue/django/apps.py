"""What Django looks for."""

from django.apps import AppConfig


class PgqueueConfig(AppConfig):
    name = "pgqueue.django"
    label = "pgqueue"
