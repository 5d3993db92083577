"""A job queue inside Postgres: enqueue jobs, and write the handlers that run them.

The package only calls the SQL functions of the schema pgqueue, which are the queue.
"""

from typing import TYPE_CHECKING, Any

from pgqueue.app import App
from pgqueue.client import (
    JobNotFound,
    LeaseLost,
    close_batch,
    create_batch,
    emit,
    enqueue,
    enqueue_many,
)
from pgqueue.job import Job
from pgqueue.policy import Reject, Retry, Snooze
from pgqueue.results import NotCompleted, Result
from pgqueue.shards import shard_of
from pgqueue.steps import Suspend
from pgqueue.task import Task
from pgqueue.waiting import Status, status, wait

if TYPE_CHECKING:
    from pgqueue.worker import Share, Worker

__all__ = [
    "App",
    "Job",
    "JobNotFound",
    "LeaseLost",
    "NotCompleted",
    "Reject",
    "Result",
    "Retry",
    "Share",
    "Snooze",
    "Status",
    "Suspend",
    "Task",
    "Worker",
    "close_batch",
    "create_batch",
    "emit",
    "enqueue",
    "enqueue_many",
    "shard_of",
    "status",
    "wait",
]


def __getattr__(name: str) -> Any:
    """Load the worker when it is first used: producers do not need it."""
    if name in ("Share", "Worker"):
        from pgqueue import worker

        return getattr(worker, name)
    raise AttributeError(f"module 'pgqueue' has no attribute {name!r}")
