"""sql/README.md against the catalog, both ways: what it says exists, and it says what exists."""

import re
import subprocess

import documents
import psycopg
import pytest
from conftest import column
from documents import run_sql
from psycopg import errors

DOCUMENT = "sql/README.md"
TEXT = documents.text(DOCUMENT)
SECTIONS = documents.sections(DOCUMENT)
SIGNATURE = re.compile(r"^    (\w+)(\(.*\) returns .*)$", re.M)
PUBLIC = "pronamespace = 'pgqueue'::regnamespace and left(proname, 1) <> '_'"
CODE = re.compile(r"\b(?:PQ|\d\d)\d{3}\b")


def entries() -> dict[str, tuple[str, str, str]]:
    """Map each function to its section, its signature, and what is said below that."""
    found = {}
    for title, section in SECTIONS.items():
        text = "\n" + documents.FENCED.sub("", section)
        # Functions may share what is said of them.
        for part in re.split(r"\n\n(?=    \w+\()", text)[1:]:
            signatures, _, said = part.partition("\n\n")
            for name, rest in SIGNATURE.findall(re.sub(r"\n {5,}", " ", signatures)):
                found[name] = (title, plain(rest), said)
    return found


def plain(signature: str) -> str:
    """Write a signature as the page does: short names of types, and no casts."""
    signature = re.sub(r"::[a-z ]+(\[\])?", "", signature.lower())
    for long, short in (
        ("timestamp with time zone", "timestamptz"),
        ("integer", "int"),
        ("table(", "table ("),
    ):
        signature = signature.replace(long, short)
    return " ".join(signature.split())


def test_every_public_function_is_there_with_exactly_its_arguments(db):
    catalog = db.execute(
        "select proname, '(' || pg_get_function_arguments(oid) || ') returns '"
        f" || pg_get_function_result(oid) from pg_proc where {PUBLIC}"
    )
    want = {name: plain(rest) for name, rest in catalog}
    assert {name: signature for name, (_, signature, _) in entries().items()} == want


def test_a_function_is_in_the_section_of_its_file() -> None:
    for name, (section, *_) in entries().items():
        module = documents.text(f"sql/{section.split()[0].lower()}.sql")
        assert f"create or replace function pgqueue.{name}(" in module


def test_the_pattern_for_psql_lists_the_public_functions_and_no_other(db):
    (command,) = re.findall(r"`(\\df pgqueue\.\S+)` lists", TEXT)
    ran = subprocess.run(
        ["psql", "-XAtq", "-d", db.info.dbname, "-c", command],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    listed = [line.split("|")[1] for line in ran.stdout.splitlines()]
    assert sorted(listed) == sorted(entries())


def test_the_examples_run_in_order_and_say_what_the_page_shows(db):
    workers = documents.blocks(SECTIONS["A worker of your own"])
    assert len(workers) == 3  # of test_own_workers
    examples = documents.blocks(TEXT)[: -len(workers)]
    assert {block.language for block in examples} == {"sql"}
    try:
        for block in examples:
            run_sql(block, db.info.dbname)
        assert "enqueue" in granted(db, "shop")
    finally:
        db.execute("drop owned by shop; drop role shop")


def granted(db: psycopg.Connection, role: str) -> list[str]:
    """List the public functions that a role may call, and the relations it may read."""
    query = """
        select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace
            and proname !~ '^_' and has_function_privilege(%(role)s, oid, 'execute')
        union all
        select relname from pg_class where relnamespace = 'pgqueue'::regnamespace
            and relkind in ('r', 'p', 'v') and has_table_privilege(%(role)s, oid, 'select')
    """
    return column(db, query, {"role": role})


# Tables of the page


def names(rows: list[list[str]]) -> list[str]:
    return [name for row in rows for name in documents.quoted(row[0])]


@pytest.mark.parametrize(
    "relation",
    [
        "queues",
        "jobs",
        "running",
        "workers",
        "kinds",
        "throughput",
        "failures",
        "dead",
        "stuck",
        "settings",
        "retention",
        "dead_job",
        "run",
    ],
)
def test_a_view_or_table_is_there_with_exactly_its_columns(db, relation):
    part = SECTIONS["Observe"].split(f"\n### {relation}\n")[1].split("\n### ")[0]
    columns = """
        select attname from pg_attribute
        where attrelid = %s::regclass and attnum > 0 and not attisdropped
    """
    said = names(documents.table(part, "column"))
    assert sorted(said) == sorted(column(db, columns, f"pgqueue.{relation}"))


def test_every_view_is_there(db):
    views = column(db, "select viewname from pg_views where schemaname = 'pgqueue'")
    titles = re.findall(r"^### (\w+)$", SECTIONS["Observe"], re.M)
    assert set(titles) == {*views, "dead_job", "run"}


def arguments(db: psycopg.Connection, function: str) -> list[str]:
    query = f"select proargnames from pg_proc where {PUBLIC} and proname = %s"
    (found,) = column(db, query, function)
    return found


def test_the_options_of_enqueue_are_its_arguments(db):
    rows = documents.table(SECTIONS["Enqueue"], "option", "default")
    assert names(rows) == arguments(db, "enqueue")


def test_the_settings_are_the_arguments_of_configure(db):
    rows = documents.table(SECTIONS["Settings"], "setting", "default")
    of_queues, of_groups = names(rows)[:7], names(rows)[7:]
    assert arguments(db, "configure") == [
        "queue", *of_queues, "reset", "kind", "group_key", *of_groups
    ]  # fmt: skip


def test_a_setting_outside_its_range_is_refused_and_one_inside_is_not(db):
    rows = documents.table(SECTIONS["Settings"], "setting", "default")
    for setting, inside, outside in (
        ("lease", ("'1 us'", "'30 days'"), ("'0'", "'31 days'")),
        ("max_attempts", ("1",), ("0",)),
        ("retry_base", ("'0'", "'1 year'"), ("'-1 s'", "'367 days'")),
        ("retry_cap", ("'0'", "'1 year'"), ("'-1 s'", "'367 days'")),
        ("keep_runs", ("0", "14"), ("-1", "15")),
        ("max_payload_bytes", ("1",), ("0",)),
        ("max_running", ("1", "1000"), ("0", "1001")),
        ("rate_limit", ("1", "1000"), ("0", "1001")),
        ("rate_period", ("'1 ms'", "'1 day'"), ("'0'", "'25 hours'")),
        ("age_after", ("'1 s'", "'1 year'"), ("'0'", "'367 days'")),
        ("weight", ("1", "100"), ("0", "101")),
        ("group_limit", ("1", "1000"), ("0", "1001")),
        ("keep_dead", ("'1 s'", "'10 years'"), ("'0'", "'3651 days 1 year'")),
        ("wait_target", ("'1 s'", "'1 year'"), ("'0'", "'367 days'")),
    ):
        (said,) = (row[2] for row in rows if row[0] == f"`{setting}`")
        limits = re.findall(r"\d+", " ".join(inside).replace("'1 us'", "0"))
        assert re.findall(r"\d+", said) == limits
        for each in inside:
            db.execute(f"select pgqueue.configure('q', {setting} => {each})")
        for each in outside:
            with pytest.raises(errors.InvalidParameterValue):
                db.execute(f"select pgqueue.configure('q', {setting} => {each})")


def test_the_roles_may_do_what_the_page_says_and_no_more(db):
    role = "pgqueue_reference"
    db.execute(f"create role {role}")
    try:
        rows = documents.table(SECTIONS["Access"], "kind", "may call")
        for kind, *told in rows:
            access = (role, *documents.quoted(kind))
            db.execute("select pgqueue.grant_access(%s, %s)", access)
            assert sorted(documents.quoted(" ".join(told))) == sorted(granted(db, role))
            db.execute("select pgqueue.revoke_access(%s, %s)", access)
    finally:
        db.execute(f"drop owned by {role}; drop role {role}")


# Errors


def test_every_sqlstate_that_is_raised_is_in_the_table_and_no_other(db):
    raised = {"42704"}  # by Postgres, for a role that is not there
    for source in column(
        db, "select prosrc from pg_proc where pronamespace = 'pgqueue'::regnamespace"
    ):
        raised |= set(re.findall(r"(?<!sqlstate )'((?:PQ|\d\d)\d{3})'", source))
        for condition in re.findall(r"errcode = '([a-z_]+)'", source):
            name = "".join(word.title() for word in condition.split("_"))
            raised.add(getattr(errors, name).sqlstate)
    assert set(names(documents.table(SECTIONS["Errors"], "SQLSTATE"))) == raised


def test_an_entry_names_the_errors_that_the_comment_names(db):
    comments = db.execute(
        f"select proname, obj_description(oid, 'pg_proc') from pg_proc where {PUBLIC}"
    )
    missing = {
        name: set(CODE.findall(comment)) - set(CODE.findall(entries()[name][2]))
        for name, comment in comments
    }
    assert {name: codes for name, codes in missing.items() if codes} == {}
