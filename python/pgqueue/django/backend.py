"""Django's tasks as jobs: enqueues them, and reads their results.

A task is a job whose kind is the task's import path, and whose payload has its args and
kwargs. It is enqueued on Django's connection, in its transaction; Django's priorities, -100 to
100, are those of jobs.
"""

import builtins
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

import psycopg
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

import pgqueue
from pgqueue.judge import summary

try:
    from django.tasks import base, exceptions, signals, task_backends
    from django.tasks.backends.base import BaseTaskBackend
except ImportError:  # before Django 6: the same, as a package of its own
    from django_tasks import base, exceptions, signals, task_backends
    from django_tasks.backends.base import BaseTaskBackend

__all__ = [
    "PgQueueBackend",
    "PgQueueTask",
    "base",
    "is_task",
    "new_result",
    "offered",
    "signals",
    "task_at",
    "task_backends",
]

log = logging.getLogger("pgqueue")

READY, RUNNING = base.TaskResultStatus.READY, base.TaskResultStatus.RUNNING
DONE, FAILED = base.TaskResultStatus.SUCCESSFUL, base.TaskResultStatus.FAILED
ENDS = {"completed": DONE, "dead": FAILED, "cancelled": FAILED, "gone": FAILED}
TIMES = ("enqueued_at", "started_at", "last_attempted_at", "finished_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class PgQueueTask(base.Task):
    """A task with options of `pgqueue.enqueue`; None means the default."""

    unique_key: str | None = None
    group_key: str | None = None
    max_attempts: int | None = None

    def using(self, **changes: Any) -> "PgQueueTask":
        """Return this task with other options; None is no change."""
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(self, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class PgQueueResult(base.TaskResult):
    """A result that keeps `enqueued_at`: the server has another clock, and forgets it at the end."""

    enqueued_at: datetime | None = field(compare=False)

    # super() would look for the class that `slots` has replaced.
    def refresh(self) -> None:
        known = self.enqueued_at
        base.TaskResult.refresh(self)
        object.__setattr__(self, "enqueued_at", known or self.enqueued_at)

    async def arefresh(self) -> None:
        known = self.enqueued_at
        await base.TaskResult.arefresh(self)
        object.__setattr__(self, "enqueued_at", known or self.enqueued_at)


class PgQueueBackend(BaseTaskBackend):
    """The BACKEND. OPTIONS: `database`, an alias of DATABASES; `max_attempts` of its tasks."""

    task_class = PgQueueTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    @property
    def database(self) -> str:
        return str(self.options.get("database", "default"))

    @property
    def connection(self) -> Any:
        """Django's connection; raises ImproperlyConfigured if it is not on psycopg 3."""
        alias = self.database
        if alias not in connections.settings:
            raise ImproperlyConfigured(f"DATABASES has no {alias!r}")
        driver = connections[alias].Database
        if driver is not psycopg:
            said = f"the database {alias!r} is on {driver.__name__}, not on psycopg 3"
            raise ImproperlyConfigured(said)
        return connections[alias]

    def check(self, **kwargs: Any) -> Iterator[checks.CheckMessage]:
        where = f"TASKS[{self.alias!r}]"
        try:
            self.connection  # noqa: B018
        except ImproperlyConfigured as error:
            yield checks.Error(f"{where}: {error}", id="pgqueue.E001")
        for name in self.options.keys() - {"database", "max_attempts"}:
            yield checks.Error(f"{where} has no option {name!r}", id="pgqueue.E002")
        if not apps.is_installed("pgqueue.django"):
            said, hint = "no manage.py pgqueue_worker", "add pgqueue.django to the apps"
            yield checks.Warning(f"{where}: {said}", hint=hint, id="pgqueue.W001")

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        self.validate_task(task)
        result = new_result(
            task, "", READY, args, kwargs, self.alias, enqueued_at=timezone.now()
        )
        run_at = task.run_after
        if run_at is not None and timezone.is_naive(run_at):  # without USE_TZ
            run_at = timezone.make_aware(run_at)
        # A task made for another backend has no options of ours.
        own = {
            name: getattr(task, name, None)
            for name in ("unique_key", "group_key", "max_attempts")
        }
        own["max_attempts"] = own["max_attempts"] or self.options.get("max_attempts")
        id = pgqueue.enqueue(
            self.connection,
            task.queue_name,
            {"args": result.args, "kwargs": result.kwargs},
            kind=task.module_path,
            priority=int(task.priority) or None,
            run_at=run_at,
            **own,
        )
        object.__setattr__(result, "id", str(id))
        signals.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: Any) -> Any:
        found = self._status(str(result_id))
        task = found and task_at(found.kind)
        if not found or not task:
            raise exceptions.TaskResultDoesNotExist(result_id)
        task = offered(task, queue_name=found.queue, priority=found.priority)
        # Without an attempt it was put off, as for want of a handler.
        errors = [e for e in found.errors or () if e["attempt"] is not None]
        ended = [_moment(error["at"]) for error in errors]  # failed attempts
        begun = [found.claimed_at] if found.claimed_at else []
        workers = {error["attempt"]: error["worker"] for error in errors}
        workers |= {found.attempt: found.worker} if found.worker else {}
        texts = [error["error"] for error in errors]
        # Why it was cancelled, or all that one may see of its attempts.
        is_known = found.finished_at or (found.errors is None and found.attempt)
        if not texts and found.last_error and is_known:
            texts = [found.last_error]
        payload = found.payload if isinstance(found.payload, dict) else {}
        result = new_result(
            task,
            str(found.id),
            ENDS.get(found.state, RUNNING if found.state == "running" else READY),
            payload.get("args", []),
            payload.get("kwargs", {}),
            self.alias,
            enqueued_at=found.enqueued_at,
            started_at=min([*ended, *begun], default=None),
            last_attempted_at=max(begun or ended, default=None),
            finished_at=found.finished_at,
            errors=[_error(text) for text in texts],
            worker_ids=[workers.get(n) or "" for n in range(1, found.attempt + 1)],
        )
        object.__setattr__(result, "_return_value", found.result)
        return result

    def _status(self, id: str) -> pgqueue.Status | None:
        if not re.fullmatch("[0-9]{1,18}", id):
            return None
        try:
            # A refusal would break a transaction that is open.
            with transaction.atomic(using=self.connection.alias):
                found: pgqueue.Status = pgqueue.status(self.connection, int(id))
                return found
        except DatabaseError as error:
            if isinstance(error.__cause__, pgqueue.JobNotFound):
                return None
            raise


def new_result(
    task: Any, id: str, status: Any, args: Any, kwargs: Any, backend: str, **known: Any
) -> Any:
    known = {**dict.fromkeys(TIMES), "errors": [], "worker_ids": [], **known}
    task = changed(task, backend=backend)  # which `refresh` asks
    row = {"task": task, "id": id, "status": status, "args": args, "kwargs": kwargs}
    return PgQueueResult(**row, **known, backend=backend)


def offered(task: Any, **options: Any) -> Any:
    """Return it with these options, unless its backend has no such queue: a job's need not be one of QUEUES."""
    try:
        return task.using(**options)
    except exceptions.TaskException:
        return task


def changed(task: Any, **changes: Any) -> Any:
    """Return it with other options, unchecked: `using` takes no backend that has not its queue."""
    options = {one.name: getattr(task, one.name) for one in fields(task)} | changes
    other = object.__new__(type(task))
    for name, value in options.items():
        object.__setattr__(other, name, value)
    return other


def task_at(path: str, tell: Callable[..., None] = log.debug) -> Any:
    """Import the task that is there, or tell why not, and return None.

    Only from a module that is loaded or part of an installed app: who may enqueue cannot have
    anything else imported.
    """
    is_near = path.rpartition(".")[0] in sys.modules
    if not (is_near or apps.get_containing_app_config(path)):
        return None
    try:
        found = import_string(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever its module raises
        tell("importing %r failed: %s", path, summary(error), exc_info=error)
        return None
    if is_task(found):
        return found
    tell("%r is no task, but of the type %s", path, type(found).__name__)
    return None


def is_task(found: Any) -> bool:
    # By its type: isinstance() would have a lazy object made, which may fail.
    return issubclass(type(found), base.Task)


def _error(text: str) -> Any:
    """Turn an error that a worker has described into Django's form."""
    name = text.partition("\n")[0].partition(":")[0]
    # Python names the class, with its module, at the end of the traceback.
    named = re.findall(rf"^((?:\w+\.)*{re.escape(name)})(?::|$)", text, re.MULTILINE)
    path = named[-1] if named else name
    if "." not in path:
        path = f"builtins.{name if hasattr(builtins, name) else 'Exception'}"
    trace = text.partition("\n\n")[2] or text
    return base.TaskError(exception_class_path=path, traceback=trace)


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if settings.USE_TZ else timezone.make_naive(moment)
