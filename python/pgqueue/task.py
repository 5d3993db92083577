"""One handler, and how its jobs are enqueued and recur."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, overload

from pgqueue.client import Options, enqueue
from pgqueue.drivers import AsyncConn
from pgqueue.payload import Arguments, to_json
from pgqueue.policy import MAX_ATTEMPTS, Policy

P = ParamSpec("P")
R = TypeVar("R")


class TaskOptions(Options, total=False):
    """What `with_options` takes: the options of `pgqueue.enqueue`, and the queue."""

    queue: str


DECLARE = (
    "select pgqueue.schedule(%(kind)s, %(queue)s, %(cron)s, %(every)s,"
    " %(payload)s::pg_catalog.jsonb, %(kind)s, timezone => %(timezone)s,"
    " catch_up => %(catch_up)s, jitter => %(jitter)s, max_attempts => %(max_attempts)s,"
    " headers => %(headers)s::pg_catalog.jsonb, group_key => %(group_key)s)"
)


@dataclass(frozen=True)
class Task(Generic[P, R]):
    """A handler: call it like the plain function, or enqueue a job for it."""

    kind: str
    function: Callable[..., R]
    arguments: Arguments
    policy: Policy
    options: TaskOptions
    is_async: bool
    schedule: dict[str, Any] | None = None  # by which its jobs recur

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return self.function(*args, **kwargs)

    def with_options(self, **options: Unpack[TaskOptions]) -> "Task[P, R]":
        """Return this task with options of `pgqueue.enqueue`: run_at, unique_key, …"""
        return replace(self, options={**self.options, **options})

    @overload
    def enqueue(
        self, conn: AsyncConn, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, int]: ...
    @overload
    def enqueue(self, conn: Any, /, *args: P.args, **kwargs: P.kwargs) -> int: ...
    def enqueue(self, conn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Add a job with these arguments by `pgqueue.enqueue`, and return its id.

        Raises TypeError for arguments that the handler does not take.
        """
        payload = self.arguments.payload(args, kwargs)
        options: dict[str, Any] = {"kind": self.kind, **self.options}
        given, own = options.get("max_attempts"), self.policy.max_attempts
        if given is not None and own is not None and given > own:
            options["headers"] = {**(options.get("headers") or {}), MAX_ATTEMPTS: given}
        return enqueue(conn, options.pop("queue"), payload, **options)

    def declare(self, conn: Any) -> None:
        """Create or change the schedule of its jobs, named after the kind."""
        payload = to_json(self.arguments.payload((), {}), "payload")
        headers = to_json(self.options.get("headers"), "headers")
        own = {"kind": self.kind, "payload": payload, "headers": headers}
        conn.execute(DECLARE, {**self.options, **(self.schedule or {}), **own})
