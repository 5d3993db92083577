"""The handlers of an application."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, Concatenate, Literal, Protocol, TypeVar, overload

from pgqueue.job import Job, Seconds, to_timedelta
from pgqueue.payload import Arguments
from pgqueue.policy import Exceptions, Middleware, Policy, both, to_seconds, to_timeout
from pgqueue.task import P, R, Task, TaskOptions

H = TypeVar("H", bound=Callable[..., Any])


class Register(Protocol):
    """The decorator that App.job returns."""

    @overload
    def __call__(self, function: Callable[Concatenate[Job, P], R]) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> Task[P, R]: ...


class App:
    """The handlers of a worker, by kind.

    `timeout` (seconds or timedelta) applies to handlers without their own. `middleware`
    is called with the Job, and returns a context manager that is entered around the attempt,
    in its thread or task; exceptions of the handler pass through it.
    """

    def __init__(
        self, *, timeout: Seconds | None = None, middleware: Middleware | None = None
    ) -> None:
        self.tasks: dict[str, Task[Any, Any]] = {}
        self.timeout = to_timeout(timeout)
        self.middleware = middleware
        self.startup: list[Callable[[], Any]] = []
        self.shutdown: list[Callable[[], Any]] = []
        self._included: set[App] = set()  # also by those
        self._around: dict[str, tuple[Middleware, ...]] = {}  # of the included apps

    def on_startup(self, function: H) -> H:
        """Call the decorated function when a worker starts, before it claims."""
        self.startup.append(function)
        return function

    def on_shutdown(self, function: H) -> H:
        """Call the decorated function when a worker has ended its last attempt."""
        self.shutdown.append(function)
        return function

    def find(self, kind: str) -> Task[Any, Any] | None:
        """Return the handler of a kind, if there is one."""
        return self.tasks.get(kind)

    def include(self, *apps: "App") -> None:
        """Take over the handlers, schedules and hooks that other apps have now.

        The timeout and the middleware of an app still apply to its own handlers. The timeout of
        this one applies to those without; its middleware is entered first. Of several apps, one
        that has included another comes before it. Raises ValueError for a kind that has another
        handler.
        """
        left = list(apps)
        while left:
            inner = {one for app in left for one in app._included if one is not app}
            app = next((app for app in left if app not in inner), left[0])
            left.remove(app)
            for task in app.tasks.values():
                known = self.tasks.get(task.kind)
                if known is None or known.function is not task.function:
                    self._take_over(app, task)
        for app in apps:
            self.startup += [hook for hook in app.startup if hook not in self.startup]
            self.shutdown += [h for h in app.shutdown if h not in self.shutdown]
            self._included |= {app, *app._included}

    def _take_over(self, app: "App", task: Task[Any, Any]) -> None:
        around = app._around.get(task.kind, ())
        if app.middleware is not None:
            around = app.middleware, *around
        if around and around[0] is self.middleware:
            around = around[1:]
        policy = replace(
            task.policy,
            timeout=task.policy.timeout or self.timeout,
            middleware=reduce(both, around, None),
        )
        self.add(replace(task, policy=policy))
        self._around[task.kind] = around

    def add(self, task: Task[Any, Any]) -> None:
        if known := self.tasks.get(task.kind):
            where = f"{known.function.__module__}.{known.function.__qualname__}"
            raise ValueError(f"the kind {task.kind!r} already has a handler: {where}")
        self.tasks[task.kind] = task

    @property
    def queues(self) -> list[str]:
        """The queues that its handlers name."""
        return list(dict.fromkeys(t.options["queue"] for t in self.tasks.values()))

    def job(
        self,
        kind: str,
        *,
        queue: str = "default",
        timeout: Seconds | None = None,
        transaction: bool = False,
        max_attempts: int | None = None,
        retry_base: Seconds | None = None,
        retry_cap: Seconds = 3600.0,
        retry_for: Exceptions = (BaseException,),
        give_up_on: Exceptions = (),
        group_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        cron: str | None = None,
        every: Seconds | None = None,
        timezone: str = "UTC",
        catch_up: Literal["skip", "one", "all"] = "one",
        jitter: Seconds | None = None,
    ) -> Register:
        """Make the decorated function, `def` or `async def`, the handler of a kind.

        A parameter named `job` gets the Job; the others get the payload's keys. A single
        parameter annotated with a dataclass or a pydantic model gets the whole payload.
        When it returns, the job completes, and the result is stored if JSON can hold it.
        When it raises, the attempt fails, unless it raises Retry, Snooze or Reject. A `def`
        runs in a thread.

        `queue` is where `.enqueue` puts the job. `timeout` (seconds or timedelta) fails an
        attempt that runs longer: an async one is cancelled; a thread cannot be, so it
        keeps its slot until it returns, and its result is dropped. math.inf means none, even
        if the app or the worker has one. With `transaction`,
        job.connection is in the transaction that completes the job by pgqueue.complete():
        the handler's writes and the completion commit together, or not at all.

        `max_attempts`, and `retry_base` doubled with each attempt up to `retry_cap` (seconds
        or timedelta), apply instead of the queue's. Only exceptions of `retry_for` are
        retried, and those of `give_up_on` never. `group_key` and `headers` apply to its
        jobs, unless `with_options` says otherwise.

        With `cron` or `every` (seconds or timedelta) a job without arguments recurs: a
        worker creates or changes the schedule named after the kind when it starts, by
        pgqueue.schedule(), whose comment explains `timezone`, `catch_up` and `jitter`.
        If you remove them again, call pgqueue.unschedule().

        Raises ValueError for a kind that already has a handler, for a timeout or max_attempts
        that is not positive, and for a negative retry_base or retry_cap; TypeError for anything
        but a function, for *args and other parameters that a payload cannot name, for an
        annotation that needs pydantic if it is not installed, and for a recurring handler that
        cannot be called without arguments.
        """
        if not isinstance(kind, str):
            raise TypeError(f"the kind is missing: @app.job('welcome'), not {kind!r}")
        longest = self.timeout if timeout is None else to_timeout(timeout)
        cap = to_timedelta(retry_cap).total_seconds()
        retries = max_attempts, to_seconds(retry_base), cap, retry_for, give_up_on
        policy = Policy(longest, transaction, *retries)
        options: TaskOptions = {
            "queue": queue,
            "max_attempts": max_attempts,
            "group_key": group_key,
            "headers": headers,
        }
        schedule = None
        if cron is not None or every is not None:
            schedule = {
                "cron": cron,
                "every": None if every is None else to_timedelta(every),
                "timezone": timezone,
                "catch_up": catch_up,
                "jitter": None if jitter is None else to_timedelta(jitter),
            }

        def register(function: Any) -> Task[Any, Any]:
            if isinstance(function, Task):  # the handler of another kind, too
                function = function.function
            is_async = inspect.iscoroutinefunction(function)
            own = Arguments(function), policy, options, is_async, schedule
            task = Task[Any, Any](kind, function, *own)
            if schedule is not None:
                task.arguments.payload((), {})
            self.add(task)
            return task

        return register
