"""Traces: from whoever enqueues a job, by its headers, to the span of each attempt."""

import asyncio
import re
import threading
import tomllib
from importlib import metadata

import documents
import pgqueue
import psycopg
import pytest
from conftest import column, one
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pgqueue import tracing
from pgqueue.testing import drain
from projects import PACKAGE, Project
from worker_harness import wait_until

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HEADERS = "select headers from pgqueue.job order by id"
OK, FAILED = trace.StatusCode.UNSET, trace.StatusCode.ERROR

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracer = provider.get_tracer("test")
app = pgqueue.App()
go_on = threading.Event()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


RAISED = {
    "ValueError": lambda: ValueError("plain: and simple"),
    "Unspeakable": lambda: Unspeakable(),
    "Retry": lambda: pgqueue.Retry(after=3600),
    "Snooze": lambda: pgqueue.Snooze(3600),
    "Reject": lambda: pgqueue.Reject("never"),
    "LeaseLost": lambda: pgqueue.LeaseLost("gone"),
}


@app.job("sync", transaction=True)
def sync(job: pgqueue.Job) -> None:
    with tracer.start_as_current_span("inner"):
        leaf.enqueue(job.connection)


@app.job("async", transaction=True)
async def async_(job: pgqueue.Job) -> None:
    with tracer.start_as_current_span("inner"):
        await asyncio.sleep(0)
        await leaf.enqueue(job.connection)


@app.job("leaf")
def leaf(job: pgqueue.Job) -> str:
    return job.headers["traceparent"]


@app.job("sync raises")
def sync_raises(name: str) -> None:
    raise RAISED[name]()


@app.job("async raises")
async def async_raises(name: str) -> None:
    raise RAISED[name]()


@app.job("again")
def again(job: pgqueue.Job) -> None:
    if job.attempt == 1:
        raise pgqueue.Retry(after=0)


@app.job("sync late", timeout=0.3)
def sync_late() -> None:
    go_on.wait(60)


@app.job("async late", timeout=0.3)
async def async_late() -> None:
    await asyncio.sleep(60)


@pytest.fixture(autouse=True)
def traced(monkeypatch) -> None:
    monkeypatch.setattr(tracing, "tracer", provider.get_tracer("pgqueue"))
    exporter.clear()


def work(dsn: str) -> None:
    pgqueue.Worker(app, {"default": 1}, dsn=dsn, burst=True).run()


def spans(name: str = "process default") -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def in_a_request(conn, kind: str) -> ReadableSpan:
    with tracer.start_as_current_span("request") as request:
        pgqueue.enqueue(conn, "default", kind=kind)
    return request


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    above, parent = span.parent, parent.get_span_context()
    return (above.trace_id, above.span_id) == (parent.trace_id, parent.span_id)


# The attempt


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_attempt_is_a_child_of_the_enqueue_and_its_own_enqueues_are_its_children(
    db, dsn, kind
) -> None:
    request = in_a_request(db, kind)
    job = one(db, "select id from pgqueue.job")
    work(dsn)
    outer, after = spans()
    (inner,) = spans("inner")
    assert (
        is_child(outer, request) and is_child(inner, outer) and is_child(after, inner)
    )
    assert (outer.kind, outer.status.status_code) == (trace.SpanKind.CONSUMER, OK)
    assert dict(outer.attributes) == {
        "messaging.system": "pgqueue",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "default",
        "messaging.message.id": str(job),
        "messaging.pgqueue.kind": kind,
        "messaging.pgqueue.attempt": 1,
        "messaging.pgqueue.outcome": "complete",
    }
    assert trace.get_current_span() is trace.INVALID_SPAN


@pytest.mark.parametrize("kind", ["sync raises", "async raises"])
@pytest.mark.parametrize(
    ("name", "outcome", "status", "message"),
    [
        ("ValueError", "fail", FAILED, "plain: and simple"),
        ("Unspeakable", "fail", FAILED, ""),
        ("Retry", "fail", FAILED, "retry"),
        ("Reject", "reject", FAILED, "never"),
        ("LeaseLost", "lost", FAILED, ""),
        ("Snooze", "release", OK, None),
    ],
)
def test_the_span_of_an_attempt_says_how_it_ended(
    db, dsn, kind, name, outcome, status, message
) -> None:
    pgqueue.enqueue(db, "default", {"name": name}, kind=kind)
    work(dsn)
    (span,) = spans()
    assert span.attributes["messaging.pgqueue.outcome"] == outcome
    assert (span.status.status_code, span.parent) == (status, None)
    if message is None:
        assert "error.type" not in span.attributes and not span.events
        return
    (event,) = span.events
    assert event.name == "exception"
    assert span.attributes["error.type"].startswith(name)
    assert event.attributes["exception.message"] == message
    if name == "ValueError":
        assert span.status.description == "ValueError: plain: and simple"
        assert "_raises" in event.attributes["exception.stacktrace"]


def test_all_attempts_at_a_job_are_in_one_trace(db, dsn) -> None:
    request = in_a_request(db, "again")
    work(dsn)
    first, second = spans()
    assert is_child(first, request) and is_child(second, request)
    tried = [s.attributes["messaging.pgqueue.attempt"] for s in (first, second)]
    assert tried == [1, 2]


@pytest.mark.parametrize("kind", ["sync late", "async late"])
def test_a_late_attempt_has_failed_whatever_its_handler_returns_then(
    db, dsn, kind
) -> None:
    go_on.clear()
    pgqueue.enqueue(db, "default", kind=kind)
    work(dsn)
    assert one(db, "select outcome from pgqueue.run") == "retry"
    go_on.set()
    (span,) = wait_until(spans)
    assert span.attributes["messaging.pgqueue.outcome"] == "fail"
    assert span.status.description == "TimeoutError: timed out after 0.3 seconds"


def test_a_span_that_cannot_be_made_fails_its_job_only(db, dsn, monkeypatch) -> None:
    class Refuses(SpanProcessor):
        def on_start(self, span, parent_context=None) -> None:
            if span.attributes["messaging.pgqueue.kind"] != "leaf":
                raise ZeroDivisionError("no span")

    refusing = TracerProvider()
    refusing.add_span_processor(Refuses())
    monkeypatch.setattr(tracing, "tracer", refusing.get_tracer("pgqueue"))
    for kind in ("sync", "async", "leaf"):
        pgqueue.enqueue(db, "default", kind=kind, headers={"traceparent": PARENT})
    work(dsn)
    ends = dict(db.execute("select kind, outcome from pgqueue.run"))
    assert ends == {"sync": "retry", "async": "retry", "leaf": "completed"}


BAD = [
    {"traceparent": PARENT.replace("-", "")},
    {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"},
    {"traceparent": "ä" * 9000},
    {"traceparent": 7},
    {"traceparent": [7]},
    {"traceparent": {"00": {}}},
    {"traceparent": None},
]


def test_an_attempt_whose_headers_name_no_parent_begins_a_trace(db, dsn) -> None:
    for headers in BAD:
        leaf.with_options(headers=headers).enqueue(db)
    leaf.with_options(headers={"traceparent": PARENT, "tracestate": 7}).enqueue(db)
    work(dsn)
    assert set(column(db, "select outcome from pgqueue.run")) == {"completed"}
    *bad, good = sorted(
        spans(), key=lambda s: int(s.attributes["messaging.message.id"])
    )
    assert [span.parent for span in bad] == [None] * len(BAD)
    assert f"{good.parent.trace_id:032x}" in PARENT


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_attempt_that_a_test_drains_is_not_in_the_trace_of_the_test(
    dsn, kind
) -> None:
    with psycopg.connect(dsn) as conn:
        request = in_a_request(conn, kind)
        with tracer.start_as_current_span("test"):
            drain(conn, app)
    outer, _ = spans()
    assert is_child(outer, request)


# The enqueue


def test_every_enqueue_in_a_span_passes_its_context_on(db, dsn) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await pgqueue.enqueue(conn, "q")
            await pgqueue.enqueue_many(conn, "q", [1, 2])

    state = trace.TraceState([("vendor", "7")])
    span = trace.SpanContext(7, 8, False, trace.TraceFlags(0), state)
    with trace.use_span(trace.NonRecordingSpan(span)):
        pgqueue.enqueue(db, "q")
        pgqueue.enqueue_many(db, "q", [1, 2])
        leaf.with_options(headers={}).enqueue(db)
        asyncio.run(run())
        pgqueue.close_batch(db, pgqueue.create_batch(db, "q"))
    context = {"traceparent": f"00-{7:032x}-{8:016x}-00", "tracestate": "vendor=7"}
    assert column(db, HEADERS) == [context] * 8


def test_the_headers_of_the_caller_stay(db) -> None:
    given = {"traceparent": PARENT}
    with tracer.start_as_current_span("request"):
        pgqueue.enqueue(db, "q", headers=given)
        pgqueue.enqueue(db, "q", headers={"tenant": 7})
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            pgqueue.enqueue(db, "q", headers=[7])
    kept, added = column(db, HEADERS)
    assert kept == given == {"traceparent": PARENT}
    assert added.keys() == {"tenant", "traceparent"} and added["tenant"] == 7


def test_without_a_span_a_job_has_no_headers(db) -> None:
    pgqueue.enqueue(db, "q")
    pgqueue.enqueue_many(db, "q", [1])
    pgqueue.close_batch(db, pgqueue.create_batch(db, "q"))
    assert column(db, HEADERS) == [None] * 3


def test_without_opentelemetry_all_works_and_handlers_see_the_traceparent(
    db, tmp_path
) -> None:
    project = Project(
        tmp_path, PGDATABASE=db.info.dbname, PYTHONPATH=f"{tmp_path}:{PACKAGE}"
    )
    project.write("sitecustomize.py", "import sys; sys.modules['opentelemetry'] = None")
    project.write("jobs.py", WITHOUT)
    project.run("-c", "import jobs; jobs.main()")
    given = "select pgqueue.enqueue('default', kind => 'told', headers => %s)"
    db.execute(given, (f'{{"traceparent": "{PARENT}"}}',))
    project.run("-m", "pgqueue.worker", "--burst", "--app", "jobs")
    results = "select result from pgqueue.run where outcome = 'completed'"
    assert sorted(column(db, results), key=str) == [PARENT, None]
    assert one(db, "select last_error from pgqueue.jobs").startswith("ValueError: as")


WITHOUT = """
import pgqueue, psycopg
from pgqueue import tracing

app = pgqueue.App()

@app.job("told")
async def told(job: pgqueue.Job) -> str | None:
    return job.headers and job.headers["traceparent"]

@app.job("fails")
def fails() -> None:
    raise ValueError("as it must")

def main() -> None:
    assert tracing.tracer is None
    with psycopg.connect() as conn:
        told.enqueue(conn)
        fails.enqueue(conn)
"""


def test_the_page_installs_what_it_imports() -> None:
    section = documents.sections("docs/tracing.md")["Tracing"]
    (block,) = documents.blocks(section, "python")
    (named,) = re.findall("`pip install ([^`]*)`", section)
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    needed = [*named.split()[1:], *project["optional-dependencies"]["otel"]]
    names = [re.split("[<>=]", one)[0] for one in needed]
    files = {str(file) for name in names for file in metadata.files(name) or ()}
    imported = re.findall(r"^from (opentelemetry\S*) import (\w+)", block.text, re.M)
    assert imported
    for module, name in imported:
        path = module.replace(".", "/")
        here = {f"{path}/__init__.py", f"{path}.py", f"{path}/{name}/__init__.py"}
        assert files & here, module
