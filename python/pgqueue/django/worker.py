"""Runs Django's tasks: `app` is what manage.py pgqueue_worker works for without --app."""

import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import suppress
from functools import cache
from inspect import iscoroutinefunction
from traceback import format_exception
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.module_loading import autodiscover_modules

from pgqueue.app import App
from pgqueue.attempt import RELEASED
from pgqueue.django.backend import (
    DONE,
    FAILED,
    RUNNING,
    PgQueueBackend,
    base,
    is_task,
    new_result,
    offered,
    signals,
    task_at,
    task_backends,
)
from pgqueue.django.databases import conninfo, place
from pgqueue.drivers import run_without_loop
from pgqueue.job import Job
from pgqueue.judge import completed, judge
from pgqueue.task import Task
from pgqueue.worker.heartbeat import LOST
from pgqueue.worker.seldom import level_of, log


class TaskApp(App):
    """The handlers of tasks: those in the modules `tasks` of the installed apps, and others.

    The others are found by their import path when a job comes, where `task_at` looks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        autodiscover_modules("tasks")
        for config in apps.get_app_configs():
            module = sys.modules.get(f"{config.name}.tasks")
            for value in list(vars(module).values()) if module else ():
                if is_task(value):
                    self.find(value.module_path)

    def find(self, kind: str) -> Task[Any, Any] | None:
        if kind not in self.tasks and (task := task_at(kind, _tell)):
            with self._lock:  # the dispatcher of another database may find it, too
                if kind not in self.tasks:
                    self.job(kind, queue=task.queue_name)(_handler(task))
        return super().find(kind)


def _tell(text: str, kind: str, why: str, **more: Any) -> None:
    """Log why a job is put off: once a minute for each kind."""
    if level_of((text, kind)) > logging.DEBUG:
        log.info(text, kind, why, **more)


def _handler(task: Any) -> Callable[..., Any]:
    """Make the handler of a task, `def` or `async def` as the task is."""
    is_async = iscoroutinefunction(task.func)

    async def tell(signal: Any, result: Any, **changes: Any) -> None:
        for name, value in changes.items():
            object.__setattr__(result, name, value)
        if is_async:
            send = sync_to_async(signal.send_robust)
            await send(PgQueueBackend, task_result=result)
        else:
            signal.send_robust(PgQueueBackend, task_result=result)

    async def run(job: Job, args: Any, kwargs: Any) -> Any:
        now, worker = timezone.now(), f"{socket.gethostname()}:{os.getpid()}"
        result = new_result(
            offered(task, queue_name=job.queue),
            str(job.id),
            RUNNING,
            args,
            kwargs,
            _backend(task, job),
            started_at=now,
            last_attempted_at=now,
            worker_ids=[""] * (job.attempt - 1) + [worker],
        )
        given = [base.TaskContext(task_result=result)] if task.takes_context else []
        await tell(signals.task_started, result)
        try:
            value = task.func(*given, *result.args, **result.kwargs)
            value = await value if is_async else value
            _check(job, value)
        except BaseException as error:
            if failure := _last_failure(job, error):
                result.errors.append(_error(failure))
                await tell(
                    signals.task_finished,
                    result,
                    status=FAILED,
                    finished_at=timezone.now(),
                )
            raise
        # Not if another has it now; a lease that is only late is no reason.
        if job._attempt.expires != LOST and job._attempt.outcome is RELEASED:
            await tell(
                signals.task_finished,
                result,
                status=DONE,
                finished_at=timezone.now(),
                _return_value=value,
            )
        return value

    def in_thread(job: Job, args: Any = (), kwargs: Any = None) -> Any:
        return run_without_loop(run(job, args, kwargs or {}))

    async def on_loop(job: Job, args: Any = (), kwargs: Any = None) -> Any:
        return await run(job, args, kwargs or {})

    return on_loop if is_async else in_thread


def _backend(task: Any, job: Job) -> str:
    """Name the backend of the database that the job is in: the task's own, if it can be."""
    own, source = str(task.backend), job._attempt.source
    if source is None:
        return own
    where = _place(source.dsn)
    return next((one for one in (own, *task_backends) if _serves(one, where)), own)


def _serves(alias: str, where: tuple[object, ...]) -> bool:
    with suppress(ValueError, ImproperlyConfigured):
        backend = task_backends[alias]
        if isinstance(backend, PgQueueBackend):
            return _place_of(backend.database) == where
    return False


_place = cache(place)


@cache
def _place_of(database: str) -> tuple[object, ...]:
    return place(conninfo(database))


def _error(error: BaseException) -> Any:
    kind = type(error)
    return base.TaskError(
        exception_class_path=f"{kind.__module__}.{kind.__qualname__}",
        traceback="".join(format_exception(error)),
    )


def _check(job: Job, value: Any) -> None:
    """Raise what the attempt will fail for although its task has returned."""
    if job._attempt.is_late():
        raise job._attempt.timeout_error()
    if isinstance(value, Awaitable | Generator | AsyncGenerator):
        completed(value)  # which refuses it


def _last_failure(job: Job, error: BaseException) -> BaseException | None:
    """Return what the task has failed for, if nothing follows this attempt."""
    # If it was given up as failed, that has been reported, whatever became of its lease.
    if job.lost and job._attempt.outcome.name != "fail":
        return None
    outcome = judge(job._attempt, error)
    is_last = job.cancelled or job.attempt >= job.max_attempts
    if outcome.name == "reject" or (outcome.name == "fail" and is_last):
        return outcome.error or error
    return None


app = TaskApp()
