"""What each kind of role may do, and what no caller can trick a function into."""

from collections.abc import Iterator

import psycopg
import pytest
from conftest import Connect, column, one
from psycopg import errors

# What each kind of role may call and read, to be compared with the catalog.
PRODUCER = {
    "enqueue", "enqueue_many", "enqueue_row", "create_batch", "close_batch",
    "status", "result", "await", "version",
}  # fmt: skip
WORKER = {
    "claim", "claim_from", "extend", "progress", "complete", "complete_many", "fail", "release",
    "finish", "reap", "maintain", "rest", "schedule", "next_slots", "version",
}  # fmt: skip
OPERATOR = {
    "cancel", "cancel_many", "redrive", "redrive_job", "discard", "discard_many",
    "purge", "pause", "resume", "rerun", "run_now", "reprioritize", "configure",
    "schedule", "unschedule", "pause_schedule", "resume_schedule", "run_schedule", "next_slots", "reap", "maintain", "why", "health", "metrics",
    "status", "result", "await", "version",
}  # fmt: skip
VIEWS = {
    "jobs",
    "queues",
    "running",
    "workers",
    "kinds",
    "throughput",
    "failures",
    "dead",
    "stuck",
    "settings",
    "schedules",
    "batches",
    "batch_jobs",
    "dependencies",
    "hours",
    "retention",
    "checks",
}
# What the views call, they call as their reader.
MEASURES = {
    "_count_jobs", "_count_dead", "_dead_kinds", "_leased", "_recent_runs", "_dead_errors",
    "_error_like", "_last_state",
}  # fmt: skip
MATRIX = {
    "producer": (PRODUCER, set()),
    "worker": (WORKER, set()),
    "operator": (
        OPERATOR | MEASURES,
        VIEWS | {"job", "dead_job", "run", "queue", "schedule"},
    ),
    "reader": ({"next_slots", "why", "health", "metrics", "version"} | MEASURES, VIEWS),
}


def functions(db: psycopg.Connection, role: str) -> set[str]:
    return set(
        column(
            db,
            "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace "
            "and has_function_privilege(%s, oid, 'execute')",
            role,
        )
    )


def relations(db: psycopg.Connection, role: str, privileges: str) -> set[str]:
    return set(
        column(
            db,
            "select relname from pg_class where relnamespace = 'pgqueue'::regnamespace "
            "and relkind in ('r', 'p', 'v') and has_table_privilege(%s, oid, %s)",
            role,
            privileges,
        )
    )


def test_a_role_without_grants_can_do_nothing(db, role):
    assert functions(db, role) == set()
    assert (
        relations(
            db, role, "select, insert, update, delete, truncate, references, trigger"
        )
        == set()
    )
    assert not column(
        db,
        "select seqrelid::regclass from pg_sequence where seqrelid::regclass::text like 'pgqueue.%%' "
        "and has_sequence_privilege(%s, seqrelid, 'usage, select, update')",
        role,
    )
    assert not one(db, "select has_schema_privilege(%s, 'pgqueue', 'usage')", role)


@pytest.mark.parametrize("kind", MATRIX)
def test_each_kind_of_role_may_do_what_the_matrix_says_and_nothing_else(db, role, kind):
    callable_, readable = MATRIX[kind]
    db.execute("select pgqueue.grant_access(%s, %s)", (role, kind))
    assert functions(db, role) == callable_
    assert relations(db, role, "select") == readable
    assert relations(db, role, "insert, update, delete, truncate, trigger") == set()
    db.execute("select pgqueue.revoke_access(%s, %s)", (role, kind))
    assert functions(db, role) == set() and relations(db, role, "select") == set()


def test_every_public_function_is_granted_to_a_kind_of_role_or_kept_for_the_owner(db):
    public = set(
        column(
            db,
            "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace and proname not like '\\_%%'",
        )
    )
    granted = set().union(*(functions for functions, _ in MATRIX.values()))
    assert public - granted == {"grant_access", "revoke_access"}


def test_a_role_that_is_producer_and_worker_needs_no_table(db, connect: Connect, role):
    for kind in ("producer", "worker"):
        db.execute("select pgqueue.grant_access(%s, %s)", (role, kind))
    worker = connect(user=role)
    worker.execute("select pgqueue.enqueue('q', unique_key => 'k')")
    worker.execute(
        "select pgqueue.enqueue('q', unique_key => 'k', on_duplicate => 'replace')"
    )
    worker.execute(
        "select pgqueue.enqueue_many('q', array['1', '2']::jsonb[], unique_keys => array['k', 'l'])"
    )
    leases = worker.execute(
        "select id, token from pgqueue.claim('q', 'w', 10)"
    ).fetchall()
    assert len(leases) == 2
    worker.execute("select pgqueue.extend(array[%s], array[%s])", leases[0])
    worker.execute("select pgqueue.complete(%s, %s)", leases[0])
    worker.execute("select pgqueue.fail(%s, %s, 'e')", leases[1])
    worker.execute("select pgqueue.maintain(), pgqueue.rest(array['q'])")
    with pytest.raises(errors.InsufficientPrivilege):
        worker.execute("select payload from pgqueue.job")


def test_a_caller_cannot_shadow_the_tables_functions_or_operators_of_a_function(
    db, connect: Connect, role
):
    for kind in ("producer", "worker", "operator"):
        db.execute("select pgqueue.grant_access(%s, %s)", (role, kind))
    db.execute(f"create schema evil authorization {role}")
    caller = connect(user=role)
    for table in ("job", "dead_job", "run", "queue"):
        caller.execute(f"create temporary table {table} (like pgqueue.{table})")
    caller.execute("""
        create function evil.always(text, text) returns boolean language sql immutable as 'select true';
        create operator evil.= (leftarg = text, rightarg = text, function = evil.always);
        create function evil.clock_timestamp() returns timestamptz language sql as $$ select timestamptz '2100-01-01' $$;
        create function evil.hashtext(text) returns int language sql as 'select 1/0';
        set search_path = evil, pg_temp, pgqueue, pg_catalog;
    """)
    id = one(caller, "select enqueue('a')")
    one(caller, "select enqueue('b')")
    claimed = caller.execute("select id, token from claim('a', 'w', 10)").fetchall()
    assert [row[0] for row in claimed] == [id]
    assert (
        one(caller, "select fail(%s, %s, 'e', permanent => true)", *claimed[0])
        == "dead"
    )
    assert column(caller, "select redrive('a')") == [id]
    assert one(caller, "select cancel(%s)", id) == "cancelled"
    assert all(
        one(caller, f"select count(*) from pg_temp.{t}") == 0
        for t in ("job", "dead_job", "run", "queue")
    )


def test_a_security_definer_function_can_limit_a_role_to_one_queue(
    db, connect: Connect, role
):
    db.execute(f"""
        create function enqueue_mail(payload jsonb) returns bigint
            language sql security definer set search_path = pg_catalog, pg_temp
            as $$ select pgqueue.enqueue('mail', payload) $$;
        revoke all on function enqueue_mail from public;
        grant execute on function enqueue_mail to {role};
    """)
    caller = connect(user=role)
    assert one(caller, "select enqueue_mail('{}')") == one(
        db, "select id from pgqueue.jobs where queue = 'mail'"
    )
    with pytest.raises(errors.InsufficientPrivilege):
        caller.execute("select pgqueue.enqueue('other')")


def test_an_error_reveals_no_payload_and_has_a_hint(db):
    db.execute(
        "select pgqueue.enqueue('q', '{\"secret\": \"swordfish\"}', unique_key => 'k')"
    )
    for call in (
        "enqueue('q', unique_key => 'k', on_duplicate => 'error')",
        "complete(1, 1)",
        "cancel(99)",
        "enqueue('q', run_at => 'infinity')",
    ):
        with pytest.raises(psycopg.Error) as refused:
            db.execute(f"select pgqueue.{call}")
        said = refused.value.diag
        assert (
            "swordfish"
            not in f"{said.message_primary} {said.message_detail} {said.message_hint}"
        )
        assert said.message_hint, f"{call} says what to do now"


# Triggers: enqueue_row has the rights of who writes the row.


ROW = "create trigger t after insert on orders for each row execute function pgqueue.enqueue_row('queue=q')"
STATEMENT = ROW.replace(
    "for each row", "referencing new table as new_rows for each statement"
)
BOTH = pytest.mark.parametrize("trigger", [ROW, STATEMENT], ids=["row", "statement"])


@pytest.fixture
def writer(db, connect: Connect, role) -> Iterator[psycopg.Connection]:
    """A session of a producer, with a schema of its own."""
    db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
    db.execute(f"create schema own authorization {role}")
    yield connect(user=role)
    db.execute("drop schema own cascade")


@BOTH
def test_a_producer_that_writes_a_table_enqueues(db, connect: Connect, role, trigger):
    db.execute("create table orders (id int)")
    db.execute(trigger)
    db.execute(f"grant insert on orders to {role}")
    db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
    with connect(user=role).cursor().copy("copy orders from stdin") as copy:
        copy.write("1\n2\n")
    assert one(db, "select count(*) from pgqueue.job") == 2


@BOTH
@pytest.mark.parametrize("kind", [None, "worker", "operator", "reader"])
def test_who_is_no_producer_cannot_write_a_table_whose_trigger_enqueues(
    db, connect: Connect, role, trigger, kind
):
    db.execute("create table orders (id int)")
    db.execute(trigger)
    db.execute(f"grant insert on orders to {role}")
    if kind:
        db.execute("select pgqueue.grant_access(%s, %s)", (role, kind))
    with pytest.raises(errors.InsufficientPrivilege) as refused:
        connect(user=role).execute("insert into orders values (1)")
    said = refused.value.diag
    assert said.message_primary == (
        f"role {role} may not enqueue, and so may not change public.orders"
    )
    assert f"grant_access('{role}', 'producer')" in (said.message_hint or "")
    assert one(db, "select count(*) from orders") == 0


def test_who_is_no_producer_cannot_create_a_trigger_that_enqueues(
    connect: Connect, role
):
    writer = connect(user=role)
    writer.execute("create temporary table orders (id int)")
    with pytest.raises(errors.InsufficientPrivilege):
        writer.execute(ROW)


def test_a_security_definer_trigger_enqueues_for_who_is_no_producer(
    db, connect: Connect, role
):
    db.execute("""
        create table orders (id int);
        create function enqueue_order() returns trigger language plpgsql
            security definer set search_path = pg_catalog, pg_temp
            as $$ begin perform pgqueue.enqueue('q', to_jsonb(new)); return null; end $$;
        create trigger t after insert on orders for each row execute function enqueue_order();
    """)
    db.execute(f"grant insert on orders to {role}")
    connect(user=role).execute("insert into orders values (1)")
    assert one(db, "select payload from pgqueue.job") == {"id": 1}


@BOTH
def test_a_cast_to_json_runs_with_the_rights_of_who_writes_the_row(db, writer, trigger):
    writer.execute("set search_path = own")
    writer.execute("""
        create type mood as enum ('fine');
        create function as_json(mood) returns json language sql as 'select to_json(current_user)';
        create cast (mood as json) with function as_json(mood);
        create table orders (id int, mood mood);
    """)
    writer.execute(trigger)
    writer.execute("insert into orders values (1, 'fine')")
    mood = one(db, "select payload -> 'new' ->> 'mood' from pgqueue.job")
    assert mood == writer.info.user


@BOTH
def test_names_of_the_writer_change_nothing_in_a_trigger(db, writer, trigger):
    writer.execute("""
        create temporary view new_rows as select 'evil' as id;
        create temporary view pg_trigger as select 'evil' as tgname;
        create function own.to_jsonb(anyelement) returns jsonb language sql as $$ select '"evil"'::jsonb $$;
        create function own.split_part(text, text, int) returns text language sql as $$ select 'evil' $$;
        create function own.always(jsonb, text) returns jsonb language sql immutable as $$ select '"evil"'::jsonb $$;
        create operator own.-> (leftarg = jsonb, rightarg = text, function = own.always);
        create table own.orders (id int);
        set search_path = own, pg_temp, pg_catalog;
    """)
    writer.execute(trigger)
    writer.execute("insert into orders values (1)")
    assert one(db, "select payload from pgqueue.job") == {
        "table": "own.orders", "op": "INSERT", "old": None, "new": {"id": 1},
    }  # fmt: skip


def test_the_session_of_the_writer_does_not_matter(db, writer, connect: Connect):
    writer.execute("create type own.mood as enum ('fine', 'so so')")
    writer.execute("create table own.orders (id int, c own.mood[])")
    writer.execute(ROW.replace("orders", "own.orders"))
    odd = connect(
        user=writer.info.user,
        options="-c standard_conforming_strings=off -c escape_string_warning=off "
        "-c quote_all_identifiers=on -c array_nulls=off",
    )
    odd.execute("insert into own.orders values (1, array['so so', null]::own.mood[])")
    payload = one(db, "select payload from pgqueue.job")
    assert payload["table"] == "own.orders"
    assert payload["new"] == {"id": 1, "c": ["so so", None]}


def test_a_view_in_the_place_of_a_transition_table_is_not_read(writer):
    writer.execute("""
        create temporary view new_rows as select 1 as id;
        create table own.orders (id int);
        create trigger t after insert on own.orders for each statement
            execute function pgqueue.enqueue_row('queue=q');
    """)
    with pytest.raises(errors.InvalidParameterValue, match="cannot find the rows"):
        writer.execute("insert into own.orders values (1)")
