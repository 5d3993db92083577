"""The tables of docs/reference/python.md, "Handlers", against the code."""

import dataclasses
import inspect

import documents
import pgqueue
import pytest
from conftest import one
from pgqueue.testing import drain

SECTION = documents.sections("docs/reference/python.md")["Handlers"]


def test_the_options_of_a_handler_are_all_there_with_their_defaults() -> None:
    parameters = inspect.signature(pgqueue.App().job).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    rows = {
        name: row[1]
        for row in documents.table(SECTION, "option")
        for name in documents.quoted(row[0])
    }
    assert list(rows) == list(options)
    said = {name: text.strip("`") for name, text in rows.items() if "`" in text}
    said.pop("timeout")  # that of the App
    assert said == {name: str(options[name]) for name in said}
    assert {options[name] for name in rows.keys() - said.keys()} == {
        None,  # of the queue or the App
        (),
        (BaseException,),
    }


def test_what_a_handler_sees_of_its_job_is_all_there() -> None:
    fields = {field.name for field in dataclasses.fields(pgqueue.Job)}
    seen = fields | {name for name in vars(pgqueue.Job) if not name.startswith("_")}
    rows = documents.table(SECTION, "attribute")
    told = {name.rstrip("()") for row in rows for name in documents.quoted(row[0])}
    assert told == {name for name in seen if not name.startswith("_")}


@pytest.mark.parametrize(
    ("number", "delay", "attempts"),
    [(0, 30, 1), (1, 60, 0), (2, None, 1), (3, 2.5, 1)],
)
def test_what_is_raised_does_to_the_job_what_the_table_says(
    connect, number, delay, attempts
) -> None:
    raised = documents.table(SECTION, "raised")[number][0].strip("`")
    error = ValueError("any") if number == 3 else eval(f"pgqueue.{raised}")
    app = pgqueue.App()

    @app.job("raises")
    def raises() -> None:
        raise error

    conn = connect(autocommit=False)
    raises.enqueue(conn)
    drain(conn, app, raises=False)
    if delay is None:
        assert one(conn, "select attempt from pgqueue.dead_job") == attempts
        return
    since = "select extract(epoch from run_at - {})::float8 from pgqueue.job"
    assert one(conn, since.format("now()")) >= delay  # the start of the transaction
    assert one(conn, since.format("clock_timestamp()")) <= max(delay, 5)
    assert one(conn, "select attempt from pgqueue.job") == attempts
