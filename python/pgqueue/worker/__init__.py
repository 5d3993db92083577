"""The worker: claims jobs, runs their handlers, and reports how they ended."""

from pgqueue.worker.terms import Share
from pgqueue.worker.worker import Worker

__all__ = ["Share", "Worker"]
