"""A job queue inside Postgres: the client, and the handlers of a worker.

The SQL functions in the schema pgqueue are the product; this calls them.
"""

from pgqueue.app import App, Job, Reject, Retry, Snooze
from pgqueue.client import JobNotFound, LeaseLost, enqueue, enqueue_many

__all__ = [
    "App",
    "Job",
    "JobNotFound",
    "LeaseLost",
    "Reject",
    "Retry",
    "Snooze",
    "enqueue",
    "enqueue_many",
]
