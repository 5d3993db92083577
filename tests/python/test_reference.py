"""docs/reference/ against the catalog, both ways: what it says exists, and it says what exists."""

import re
import subprocess

import documents
import psycopg
import pytest
from conftest import column
from psycopg import errors
from psycopg.rows import namedtuple_row

TEXT = documents.text("docs/reference/README.md")
SECTIONS = {
    title: text
    for page in documents.REFERENCE
    for title, text in documents.sections(page).items()
    if title
}
SIGNATURE = re.compile(r"^    (\w+)(\(.*\) (?:returns .*|procedure))$", re.M)
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
        "select proname, '(' || replace(pg_get_function_arguments(oid), 'IN ', '') || ') '"
        " || coalesce('returns ' || pg_get_function_result(oid), 'procedure')"
        f" from pg_proc where {PUBLIC}"
    )
    want = {name: plain(rest) for name, rest in catalog}
    assert {name: signature for name, (_, signature, _) in entries().items()} == want


def test_a_function_is_in_the_section_of_its_file() -> None:
    for name, (section, *_) in entries().items():
        files = documents.REPO.glob(f"sql/*/{section.split()[0].lower()}.sql")
        head = re.compile(rf"create or replace (function|procedure) pgqueue\.{name}\(")
        assert any(head.search(file.read_text()) for file in files)


def test_the_pattern_for_psql_lists_the_public_functions_and_no_other(db):
    (command,) = re.findall(r"`(\\df pgqueue\.\S+)` lists", TEXT)
    ran = subprocess.run(
        ["psql", "-XAtq", "-d", db.info.dbname, "-c", command],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    listed = [line.split("|")[1] for line in ran.stdout.splitlines()]
    assert sorted(listed) == sorted(entries())


def test_no_two_pages_have_a_section_of_the_same_name() -> None:
    titles = [
        title for page in documents.REFERENCE for title in documents.sections(page)
    ]
    assert len(SECTIONS) == len([title for title in titles if title])


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
        "checks",
        "events",
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


def test_the_outcomes_are_those_of_the_list(db):
    runs = SECTIONS["Observe"].split("\n### run\n")[1].split("\n### ")[0]
    (said,) = (
        row[1] for row in documents.table(runs, "column") if row[0] == "`outcome`"
    )
    listed = column(db, "select name from pgqueue._outcome where name is not null")
    assert documents.quoted(said) == listed
    asked = documents.table(SECTIONS["Finish"], "outcome", "its text")
    listed = column(db, "select asked_by from pgqueue._outcome where asked_by > ''")
    assert sorted(names(asked)) == sorted(listed)


def test_every_view_is_there(db):
    views = column(
        db,
        "select viewname from pg_views where schemaname = 'pgqueue' and viewname !~ '^_'",
    )
    titles = re.findall(r"^### (\w+)$", SECTIONS["Observe"], re.M)
    assert set(titles) == {*views, "dead_job", "run"}


def arguments(db: psycopg.Connection, function: str) -> list[str]:
    query = f"select proargnames from pg_proc where {PUBLIC} and proname = %s"
    (found,) = column(db, query, function)
    return found


def test_the_sequences_that_are_dumped_are_named(db):
    query = (
        "select c.relname from pg_extension as e join pg_class as c on c.oid = any(e.extconfig)"
        " where e.extname = 'pgqueue' and c.relkind = 'S'"
    )
    named = re.findall(r"`(\w+_seq)`", SECTIONS["Sequences"])
    assert sorted(named) == sorted(column(db, query))


def test_the_options_of_enqueue_are_its_arguments(db):
    rows = documents.table(SECTIONS["Enqueue"], "option", "default")
    assert names(rows) == arguments(db, "enqueue")


def test_the_settings_are_the_arguments_of_configure(db):
    rows = documents.table(SECTIONS["Settings"], "setting", "default")
    of_queues, of_groups = names(rows)[:7], names(rows)[7:]
    assert arguments(db, "configure") == [
        "queue", *of_queues, "reset", "kind", "group_key", *of_groups
    ]  # fmt: skip


def test_the_checks_of_health_are_those_of_the_list(db):
    rows = documents.table(SECTIONS["Health"], "check", "warning")
    assert sorted(names(rows)) == sorted(column(db, "select name from pgqueue.checks"))


def listed(db: psycopg.Connection) -> list:
    with db.cursor(row_factory=namedtuple_row) as cursor:
        cursor.execute("select * from pgqueue._setting where name <> 'paused'")
        return cursor.fetchall()


def handler(db: psycopg.Connection) -> str:
    """Make a function that work() can call, and name it."""
    db.execute("create function handle(jsonb) returns void language sql as ''")
    return "handle(jsonb)"


def test_each_setting_is_there_with_its_default_and_range(db):
    rows = documents.table(SECTIONS["Settings"], "setting", "default")
    want = {}
    for setting in listed(db):
        default, words = setting.fallback, " to ".join(setting.range or [])
        if setting.type == "text":
            default, words = (
                default and f"`{default}`",
                " or ".join(f"`{v}`" for v in setting.range or []),
            )
        elif len(setting.range or []) == 1:
            words = f"from {words}"
        want[f"`{setting.name}`"] = [default, words]
    want["`lease`"][1] = "above 0, to 30 days"
    for name, default, words, _ in rows:
        wanted, range_ = want.pop(name)
        no_value = ["no limit", "never", "for ever", "none"]
        assert default in ([wanted] if wanted else no_value)
        assert words == range_
    assert not want


def test_a_setting_outside_its_range_is_refused_and_one_inside_is_not(db):
    for setting in listed(db):
        inside, outside = setting.range or ["true", "false"], []
        if setting.name == "handler":
            inside, outside = [handler(db)], ["now()"]
        elif setting.type == "text":
            outside = ["nothing like it"]
        elif setting.range:
            beyond = "select ({}::{} {})::text"
            for bound, step in zip(inside, ("-", "+"), strict=False):
                one_more = {"int": f"{step} 1", "interval": f"{step} interval '1 us'"}
                query = beyond.format("%s", setting.type, one_more[setting.type])
                outside += column(db, query, bound)
        queue = "null" if "less than all" in (setting.not_for or []) else "'q'"
        call = f"select pgqueue.configure({queue}, {setting.name} => %s)"
        for value in inside:
            db.execute(call, (value,))
        for value in outside:
            with pytest.raises(errors.InvalidParameterValue, match=setting.name):
                db.execute(call, (value,))


def test_a_setting_is_refused_for_what_it_is_not_for_and_for_nothing_else(db):
    scopes = {
        "less than all": "kind => null",
        "a kind": "kind => 'k'",
        "a group": "group_key => 'g'",
        "each group": "group_key => '*'",
        "a kind and a group together": "kind => 'k', group_key => 'g'",
    }
    wider = {
        "each group": {"a group"},
        "a kind and a group together": {"a kind", "a group"},
    }
    for setting in listed(db):
        value = (setting.range or ["true"])[0]
        if setting.name == "handler":
            value = handler(db)
        for scope, named in scopes.items():
            call = f"select pgqueue.configure('q', {setting.name} => %s, {named})"
            refusing = {scope, "less than all", *wider.get(scope, ())}
            refusing &= {*(setting.not_for or ())}
            if not refusing:
                db.execute(call, (value,))
                continue
            with pytest.raises(errors.InvalidParameterValue) as refused:
                db.execute(call, (value,))
            message, _, what = str(refused.value).splitlines()[0].partition(" for ")
            assert message == f"{setting.name} cannot be set" and what in refusing


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
