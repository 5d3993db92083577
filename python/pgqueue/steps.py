"""What a job remembers from one attempt to the next: its steps, and what it waits for.

It uses only the SQL functions save_step, steps, suspend and results_of, so that a handler in
any language, or in SQL, can go on with the same job.
"""

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from pgqueue.drivers import INTERVAL, as_interval, settled
from pgqueue.payload import result_reader, storable, to_json
from pgqueue.results import NotCompleted, Result

T = TypeVar("T")
Time = timedelta | None  # to wait
SAVE = (
    "select pgqueue.save_step(%s, %s, %s, %s::pg_catalog.text::pg_catalog.jsonb)"
    "::pg_catalog.text"
)
# Counted from the first attempt that gets here, by the server's clock.
DEADLINE = (
    "select d.at operator(pg_catalog.#>>) '{}', (d.at operator(pg_catalog.#>>) '{}')"
    "::timestamp with time zone operator(pg_catalog.<=) pg_catalog.clock_timestamp()"
    " from (select pgqueue.save_step(%s, %s, %s, pg_catalog.to_jsonb("
    f"pg_catalog.clock_timestamp() operator(pg_catalog.+) {INTERVAL})) as at offset 0) as d"
)
# The event's payload comes without a name. A null reads none of that.
READ = (
    "select s.name, s.value::pg_catalog.text from pgqueue.steps(%s) as s union all"
    " select null::pg_catalog.text, e.payload::pg_catalog.text from pgqueue.events as e"
    " where e.name operator(pg_catalog.=) %s::pg_catalog.text"
)
RESULTS = (
    "select r.id, r.kind, r.outcome, r.result::pg_catalog.text"
    " from pgqueue.results_of(%s, %s, %s, %s) as r"
)
SUSPEND = (
    "select pgqueue.suspend(%s, %s, t.event, t.run_at, t.after, t.step)"
    " from pg_catalog.jsonb_to_record(%s::pg_catalog.text::pg_catalog.jsonb)"
    " as t (event pg_catalog.text, run_at timestamp with time zone, after bigint[],"
    " step pg_catalog.text)"
)
# It is saved before, as a condition.
SAVE_AND_SUSPEND = (
    f"{SUSPEND}, ({SAVE} as value offset 0) as s where s.value is not null"
)
PAGE = 1000


class Suspend(BaseException):
    """Ends the handler of a job that waits: let it through. The next attempt starts anew."""


class Steps:
    """The memory of a job, as one attempt sees it."""

    def __init__(self, lease: tuple[int, int], ask: Callable[..., Any]) -> None:
        self.terms: str | None = None  # on which the job is to be suspended, in JSON
        # A step to save with that, and its value.
        self.last: tuple[str, str] | None = None
        self._to_await: set[Coroutine[Any, Any, Any]] = set()
        self._lease = lease  # job and token
        self._ask = ask
        self._known: dict[str, Any] | None = None
        # Waits that have failed. If that ends the attempt, the next one looks again.
        self._failures: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._names: set[str] = set()

    def name(self, name: str) -> str:
        """Number names that are used again in the attempt: "page", "page 2", "page 3"."""
        if self.terms is not None:
            raise Suspend  # a handler that has caught it gets no further
        if name != storable(name) or not 1 <= len(name.encode()) <= 200:
            what = "must have 1 to 200 bytes, all of them text"
            raise ValueError(f"the name of a step {what}: {name[:200]!r}")
        self._counts[name] += 1
        count = self._counts[name]
        numbered = name if count == 1 else derived(f"{name} {count}")
        if numbered in self._names:  # which the handler itself has used
            return self.name(name)
        self._names.add(numbered)
        return numbered

    def is_end(self, error: BaseException) -> bool:
        """Whether a handler has raised only what suspends its job."""
        if isinstance(error, BaseExceptionGroup):  # by several tasks
            return error.split(Suspend)[1] is None
        return isinstance(error, Suspend)

    def to_await(self, running: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Remember what an async handler has yet to await, or to close by cancelling its task."""

        async def later() -> T:
            self._to_await.remove(it)
            return await running

        it = later()
        self._to_await.add(it)
        return it

    def check(self) -> None:
        """Raise RuntimeError if the handler has returned, but should have been ended."""
        if self.terms is not None:
            raise RuntimeError(
                "the handler caught pgqueue.Suspend, which ends it until what it waits for"
                " has happened: let a bare except, or an except BaseException, raise it again"
            )
        if "CORO_CREATED" in map(inspect.getcoroutinestate, self._to_await):
            raise RuntimeError("the handler did not await what its job returned")

    async def end(self) -> None:
        """Suspend the job, and save what goes with that: both, or neither."""
        saves = () if self.last is None else (*self._lease, *self.last)
        query = SAVE_AND_SUSPEND if saves else SUSPEND
        await self._ask(query, *self._lease, self.terms, *saves)

    async def step(self, name: str, run: Callable[[], Any], function: Any) -> Any:
        read = result_reader(function)
        known = await self._load()
        if name not in known:
            await self._save_failures()
            await self._save(name, to_json(await settled(run()), f"step {name!r}"))
        return known[name] if read is None else read(known[name])

    async def sleep(self, name: str, seconds: timedelta) -> None:
        await self._until(name, name, seconds)

    async def wait_for(self, event: str, name: str, timeout: Time) -> Any:
        known, payload = self._known, None
        if known is None or name not in known:
            known, payload = await self._read(event)
        if name not in known:
            if payload is None:
                await self._until(name, f"{name}: until", timeout, event=event)
                await self._save(name, '{"timed_out": true}', is_failure=True)
            else:
                await self._save(name, f'{{"payload": {payload}}}')
        if "payload" not in known[name]:
            raise TimeoutError(f"{event!r} has not happened in time")
        return known[name]["payload"]

    async def wait_for_jobs(self, name: str, ids: Sequence[int], timeout: Time) -> Any:
        known, ids = await self._load(), list(ids)
        ended = f"{name}: ended"
        before, rows = known.get(name), known.get(ended)
        if before is None and rows is not None:
            before = [row[0] for row in rows]
        if before is not None and sorted(before) != sorted(ids):
            told = "jobs, as if this wait had been inserted before that one"
            raise RuntimeError(f"an earlier attempt waited here for other {told}")
        if ended not in known:
            values = None
            found = {r.id: r for r in await self.results()}
            rows = [found.get(id, Result(id, None, "gone", None)) for id in ids]
            is_new = name not in known
            if ids and (is_new or any(r.outcome is None for r in rows)):
                # Once it is saved, a job without a result is gone.
                last = (name, json.dumps(ids)) if is_new else None
                await self._until(name, f"{name}: until", timeout, last, after=ids)
            else:
                values = [[r.id, r.kind, r.outcome, r.result] for r in rows]
            failed = values is None or any(r.outcome != "completed" for r in rows)
            await self._save(ended, to_json(values, name), failed)
        if known[ended] is None:
            raise TimeoutError("the jobs have not ended in time")
        by_id = {row[0]: Result(*row) for row in known[ended]}
        results = [by_id[id] for id in ids]
        if any(r.outcome != "completed" for r in results):
            raise NotCompleted(results)
        return [r.result for r in results]

    async def results(self) -> list[Result]:
        found: list[Result] = []
        while True:
            last = found[-1].id if found else 0
            rows = await self._ask(RESULTS, *self._lease, last, PAGE)
            found += [Result(i, k, o, r and json.loads(r)) for i, k, o, r in rows]
            if len(rows) < PAGE:
                return found

    async def _load(self) -> dict[str, Any]:
        return (await self._read())[0] if self._known is None else self._known

    async def _read(self, event: str | None = None) -> tuple[dict[str, Any], Any]:
        """Read the steps, once, and with them the payload of an event that has happened."""
        job_id = self._lease[0] if self._known is None else None
        rows = await self._ask(READ, job_id, event)
        if self._known is None:  # else another task was quicker
            self._known = {name: json.loads(text) for name, text in rows if name}
        return self._known, next((text for name, text in rows if not name), None)

    async def _save(
        self, name: str, text: str | None, is_failure: bool = False
    ) -> None:
        """Save a step, a failure only when more follows; if another attempt has, keep that."""
        saved = text or "null"
        if is_failure:
            self._failures[name] = saved
        else:
            await self._save_failures()
            ((saved,),) = await self._ask(SAVE, *self._lease, name, saved)
        (await self._load())[name] = json.loads(saved)

    async def _save_failures(self) -> None:
        for name in list(self._failures):
            await self._save(name, self._failures.pop(name))

    async def _until(
        self,
        name: str,
        until: str,
        timeout: Time,
        last: tuple[str, str] | None = None,
        **terms: Any,
    ) -> None:
        """Return if a wait is over, by its deadline or by run_now; else suspend the job."""
        is_over = False
        await self._save_failures()
        if timeout is not None:
            over, known = derived(f"{name}: over"), await self._load()
            seconds = as_interval(timeout)
            rows = await self._ask(DEADLINE, *self._lease, until, seconds)
            ((terms["run_at"], is_due),) = rows
            terms["step"], is_over = over, is_due or over in known
        if last or not is_over:
            if self.terms is None:  # else another task was quicker
                self.terms, self.last = json.dumps(terms), last
            raise Suspend


def derived(name: str, most: int = 200) -> str:
    """Shorten the name of a step of ours: it is the user's name with something added."""
    encoded = name.encode(errors="replace")
    if len(encoded) <= most:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:32]
    return f"{encoded[: most - 40].decode(errors='ignore')}… {digest}"
