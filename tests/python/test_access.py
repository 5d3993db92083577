"""What each kind of role may do, and what no caller can trick a function into."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from conftest import Connect, column, one
from psycopg import errors
from psycopg.types.json import Jsonb

# One row for each routine and relation: its name, its mark for each kind, how to call it.
TABLE = (Path(__file__).parents[1] / "access.md").read_text()
HEAD, *ROWS = [
    [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
    for line in TABLE.splitlines()
    if line.startswith("|") and not line.startswith("|--")
]
KINDS = HEAD[1:-1]
ROUTINES = [row for row in ROWS if row[-1]]
RELATIONS = [row for row in ROWS if not row[-1]]
LIMITED = ["producer", "worker", "scheduler"]


def allowed(rows: list[list[str]], *kinds: str) -> set[str]:
    return {row[0] for row in rows if any(row[HEAD.index(kind)] for kind in kinds)}


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


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_role_may_do_what_the_matrix_says_and_nothing_else(db, role, kind):
    db.execute("select pgqueue.grant_access(%s, %s)", (role, kind))
    assert functions(db, role) == allowed(ROUTINES, kind)
    assert relations(db, role, "select") == allowed(RELATIONS, kind)
    assert relations(db, role, "insert, update, delete, truncate, trigger") == set()
    db.execute("select pgqueue.revoke_access(%s, %s)", (role, kind))
    assert functions(db, role) == set() and relations(db, role, "select") == set()


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_and_view_is_refused_or_not_as_the_matrix_says(
    db, connect: Connect, role, kind
):
    db.execute("select pgqueue.grant_access(%s, %s)", (role, kind))
    caller = connect(user=role)
    for name, *marks, call in ROWS:
        said = None
        try:
            with caller.transaction(force_rollback=True):
                what = f"pgqueue.{name}{call}" if call else f"from pgqueue.{name}"
                is_procedure = name == "work"
                caller.execute(
                    f"call {what}" if is_procedure else f"select {what} limit 1"
                )
        except psycopg.Error as error:
            said = error.sqlstate
        is_refused = said == errors.InsufficientPrivilege.sqlstate
        assert is_refused != bool(marks[KINDS.index(kind)]), (name, said)


def test_the_matrix_lists_every_public_routine_and_relation(db):
    public = "not like '\\_%%' and {} !~ '^run_[0-9]+$'"
    routines = column(
        db,
        "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace "
        f"and proname {public.format('proname')}",
    )
    tables = column(
        db,
        "select relname from pg_class where relnamespace = 'pgqueue'::regnamespace "
        f"and relkind in ('r', 'p', 'v') and relname {public.format('relname')}",
    )
    assert {row[0] for row in ROUTINES if row[0][0] != "_"} == set(routines)
    assert {row[0] for row in RELATIONS} == set(tables)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_role_may_do_by_another_kind_stays_when_one_is_revoked(db, role, kind):
    for each in KINDS:
        db.execute("select pgqueue.grant_access(%s, %s)", (role, each))
    db.execute("select pgqueue.revoke_access(%s, %s)", (role, kind))
    others = [each for each in KINDS if each != kind]
    assert functions(db, role) == allowed(ROUTINES, *others)
    assert relations(db, role, "select") == allowed(RELATIONS, *others)


# Access to single queues.


@pytest.fixture
def mine(db, connect: Connect, role) -> psycopg.Connection:
    """A session of a producer, worker and scheduler of the queue `mine` only."""
    for kind in LIMITED:
        db.execute("select pgqueue.grant_access(%s, %s, 'mine')", (role, kind))
    return connect(user=role)


def refused(caller: psycopg.Connection, call: str, *, by: str = "42501") -> None:
    with pytest.raises(psycopg.Error) as error:
        caller.execute(f"select * from pgqueue.{call}")
    assert error.value.sqlstate == by, (call, error.value)
    assert error.value.diag.message_hint


def lease(db, queue: str) -> tuple[int, int]:
    db.execute("select pgqueue.enqueue(%s)", (queue,))
    return db.execute(
        "select id, token from pgqueue.claim(%s, 'w')", (queue,)
    ).fetchone()


@pytest.mark.parametrize("kind", LIMITED)
def test_a_role_limited_to_a_queue_has_the_same_functions(db, role, kind):
    db.execute("select pgqueue.grant_access(%s, %s, 'mine')", (role, kind))
    assert functions(db, role) == allowed(ROUTINES, kind)


@pytest.mark.parametrize("setting", [None, "mine", "other"])
def test_what_is_about_another_queue_is_refused(db, mine, setting):
    if setting:
        db.execute("select pgqueue.configure(%s, lease => '1 minute')", (setting,))
    for call in (
        "enqueue({})",
        "enqueue({}, priority => 1)",
        "enqueue({}, unique_key => 'k', unique_for => '1 hour')",
        "enqueue_many({}, array['1']::jsonb[])",
        "enqueue_many({}, array['1']::jsonb[], unique_keys => array['k'])",
        "create_batch({})",
        "claim({}, 'w')",
        "claim_from(array[{}], 'w')",
        "rest(array[{}], park => false)",
        "schedule('s ' || {}, {}, every => '1 hour')",
    ):
        mine.execute("select pgqueue." + call.replace("{}", "'mine'"))
        refused(mine, call.replace("{}", "'other'"))


def test_a_key_of_another_queue_is_not_told(db, mine):
    db.execute(
        "select pgqueue.enqueue('other', unique_key => 'k', unique_for => '1 day')"
    )
    refused(mine, "enqueue('other', unique_key => 'k', unique_for => '1 day')")


def test_a_producer_does_not_know_the_jobs_and_batches_of_another_queue(db, mine):
    waiting = one(db, "select pgqueue.enqueue('other')")
    done = lease(db, "other")
    db.execute("select pgqueue.complete(%s, %s, '1')", done)
    dead = lease(db, "other")
    db.execute("select pgqueue.fail(%s, %s, 'e', permanent => true)", dead)
    for id in waiting, done[0], dead[0]:
        for verb in "status", "result", "await":
            refused(mine, f"{verb}({id})", by="PQ001")
    batch = one(db, "select pgqueue.create_batch('other')")
    refused(mine, f"close_batch({batch})", by="PQ001")
    refused(mine, f"enqueue('mine', batch_id => {batch})", by="PQ001")
    own = lease(db, "mine")
    assert one(mine, "select state from pgqueue.status(%s)", own[0]) == "running"
    assert one(mine, "select pgqueue.await(%s)", own[0])
    db.execute("select pgqueue.complete(%s, %s, '1')", own)
    assert one(mine, "select pgqueue.result(%s)", own[0]) == 1


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_worker_with_the_token_of_another_queue_has_lost_it(db, mine, is_logged):
    if is_logged:
        db.execute("select pgqueue.configure(null, keep_payloads => true)")
    id, token = lease(db, "other")
    for call in (
        f"complete({id}, {token})",
        f"fail({id}, {token}, 'e')",
        f"progress({id}, {token}, 1)",
        f"save_step({id}, {token}, 's')",
        f"suspend({id}, {token}, 'e')",
        f"results_of({id}, {token})",
    ):
        refused(mine, call, by="PQ002")
    ids = f"array[{id}], array[{token}]"
    assert one(mine, f"select status from pgqueue.extend({ids})") == "lost"
    assert (
        one(mine, f"select status from pgqueue.finish({ids}, array['complete'])")
        == "lost"
    )
    assert (
        one(mine, f"select status from pgqueue.finish({ids}, array['fail'])") == "lost"
    )
    for verb in "complete_many", "release":
        assert column(mine, f"select pgqueue.{verb}({ids})") == []
    assert one(db, "select done is null and worker = 'w' from pgqueue.running")
    assert one(db, "select count(*) from pgqueue.run") == 0
    db.execute("select pgqueue.save_step(%s, %s, 's')", (id, token))
    assert column(mine, "select name from pgqueue.steps(%s)", id) == []
    own = lease(db, "mine")
    mine.execute("select pgqueue.save_step(%s, %s, 's')", own)
    assert column(mine, "select name from pgqueue.steps(%s)", own[0]) == ["s"]
    mine.execute("select pgqueue.progress(%s, %s, 1)", own)
    mine.execute("select pgqueue.complete(%s, %s)", own)


def test_a_worker_sees_the_results_of_the_jobs_that_it_may_enqueue(db, mine, role):
    db.execute("select pgqueue.grant_access(%s, 'producer', 'parts')", (role,))
    part = one(mine, "select pgqueue.enqueue('parts')")
    other = one(db, "select pgqueue.enqueue('other')")
    id, token = lease(db, "mine")
    mine.execute(
        "select pgqueue.suspend(%s, %s, after => %s)", (id, token, [part, other])
    )
    for queue in "parts", "other":
        db.execute("select pgqueue.complete(%s, %s, '1')", lease(db, queue))
    held = mine.execute("select id, token from pgqueue.claim('mine', 'w')").fetchone()
    found = mine.execute(
        "select id, outcome, result from pgqueue.results_of(%s, %s)", held
    )
    assert found.fetchall() == [(part, "completed", 1)]


def test_what_a_schedule_or_batch_of_another_queue_enqueues_is_enqueued(db, mine):
    db.execute("select pgqueue.schedule('s', 'other', every => '1 second')")
    batch = one(db, "select pgqueue.create_batch('other')")
    db.execute("select pgqueue.enqueue('mine', batch_id => %s)", (batch,))
    db.execute("select pgqueue.close_batch(%s)", (batch,))
    db.execute(
        "update pgqueue.schedule set due_at = now(), next_slot = now() - interval '1 second'"
    )
    held = mine.execute("select id, token from pgqueue.claim('mine', 'w')").fetchone()
    mine.execute("select pgqueue.complete(%s, %s)", held)
    mine.execute("select pgqueue.maintain()")
    counts = column(db, "select count(*) from pgqueue.job where queue = 'other'")
    assert counts[0] >= 2
    assert not one(db, "select problem from pgqueue.schedule")


def test_a_role_is_limited_to_all_queues_of_its_grants_and_of_roles_it_is_member_of(
    db, connect: Connect, role
):
    db.execute("create role pgqueue_team")
    try:
        db.execute(f"grant pgqueue_team to {role}")
        for name, queue in (role, "a"), (role, "b"), ("pgqueue_team", "c"):
            db.execute("select pgqueue.grant_access(%s, 'producer', %s)", (name, queue))
        caller = connect(user=role)
        for queue in "abc":
            caller.execute("select pgqueue.enqueue(%s)", (queue,))
        refused(caller, "enqueue('d')")
        db.execute("select pgqueue.revoke_access(%s, 'producer', 'a')", (role,))
        refused(caller, "enqueue('a')")
        caller.execute("select pgqueue.enqueue('b')")
        db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
        caller.execute("select pgqueue.enqueue('d')")
        db.execute("select pgqueue.revoke_access(%s, 'producer')", (role,))
        refused(caller, "enqueue('d')")
        caller.execute("select pgqueue.enqueue('c')")
    finally:
        db.execute("drop owned by pgqueue_team")
        db.execute("drop role pgqueue_team")


def test_a_role_that_is_dropped_and_made_again_has_none_of_its_old_access(
    db, connect: Connect, role
):
    db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
    db.execute(f"drop owned by {role}")
    db.execute(f"drop role {role}")
    db.execute(f"create role {role} login")
    db.execute("select pgqueue.grant_access(%s, 'producer', 'mine')", (role,))
    refused(connect(user=role), "enqueue('other')")


@pytest.mark.parametrize("kind", [None, "worker"])
def test_a_role_made_anew_has_by_membership_no_more_than_others(
    db, connect: Connect, role, kind
):
    """Whatever a role of its name had, and also if it has another kind of access itself."""
    db.execute("create role pgqueue_team")
    try:
        db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
        db.execute(f"drop owned by {role}")
        db.execute(f"drop role {role}")
        db.execute("select pgqueue.grant_access('pgqueue_team', 'producer', 'mine')")
        db.execute(f"create role {role} login in role pgqueue_team")
        if kind:
            db.execute("select pgqueue.grant_access(%s, %s, 'mine')", (role, kind))
        caller = connect(user=role)
        refused(caller, "enqueue('other')")
        caller.execute("select pgqueue.enqueue('mine')")
    finally:
        db.execute("drop owned by pgqueue_team")
        db.execute("drop role pgqueue_team")


def test_what_is_left_of_a_dropped_role_can_be_revoked(db, role):
    db.execute("create role pgqueue_gone")
    db.execute("select pgqueue.grant_access('pgqueue_gone', 'worker', 'mine')")
    db.execute("drop owned by pgqueue_gone")
    db.execute("drop role pgqueue_gone")
    db.execute("select pgqueue.revoke_access('pgqueue_gone', 'worker')")
    assert one(db, "select count(*) from pgqueue.access") == 0
    assert one(db, "select count(*) from pgqueue.queue_in_force") == 0
    with pytest.raises(errors.UndefinedObject):
        db.execute("select pgqueue.revoke_access('pgqueue_gone', 'worker')")


@pytest.mark.parametrize("call", ["grant_access", "revoke_access"])
def test_a_change_of_access_waits_for_another(
    db, connect: Connect, blocked, role, call
):
    db.execute("create role pgqueue_other")
    try:
        db.execute("select pgqueue.grant_access('pgqueue_other', 'worker')")
        other = connect()
        with ThreadPoolExecutor() as pool:
            with db.transaction():
                db.execute("select pgqueue.grant_access(%s, 'worker')", (role,))
                done = pool.submit(
                    other.execute, f"select pgqueue.{call}('pgqueue_other', 'worker')"
                )
                blocked(other)
            done.result()
        assert functions(db, "pgqueue_other") == (
            functions(db, role) if call == "grant_access" else set()
        )
    finally:
        db.execute("drop owned by pgqueue_other")
        db.execute("drop role pgqueue_other")


def test_a_role_of_all_queues_is_told_that_a_queue_does_not_limit_it(db, role):
    said = []
    db.add_notice_handler(lambda notice: said.append(notice.message_primary))
    db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
    for change in "grant_access", "revoke_access":
        db.execute(f"select pgqueue.{change}(%s, 'producer', 'mine')", (role,))
    assert said == [f"role {role} is still a producer of all queues"] * 2


def test_superusers_and_roles_of_all_queues_are_not_limited(db, mine, connect: Connect):
    db.execute("select pgqueue.enqueue('other')")
    db.execute("create role pgqueue_all login")
    try:
        db.execute("select pgqueue.grant_access('pgqueue_all', 'producer')")
        connect(user="pgqueue_all").execute("select pgqueue.enqueue('other')")
    finally:
        db.execute("drop owned by pgqueue_all")
        db.execute("drop role pgqueue_all")


def test_the_last_limit_that_is_revoked_leaves_nothing_behind(db, role):
    for kind in LIMITED:
        db.execute("select pgqueue.grant_access(%s, %s, 'mine')", (role, kind))
        db.execute("select pgqueue.revoke_access(%s, %s, 'mine')", (role, kind))
    assert functions(db, role) == set()
    assert one(db, "select count(*) from pgqueue.queue_in_force") == 0
    assert one(db, "select count(*) from pgqueue.access") == 0


def test_limits_outlive_a_reset_of_the_settings_of_all(db, mine):
    db.execute("select pgqueue.configure(null, max_attempts => 3)")
    refused(mine, "enqueue('other')")
    db.execute("select pgqueue.configure(null, reset => true)")
    refused(mine, "enqueue('other')")


def test_maintain_restores_limits_where_a_copy_left_the_sequences_out(db, mine):
    db.execute("delete from pgqueue.queue_in_force")
    db.execute("select setval('pgqueue.used_seq', 0), setval('pgqueue.awaited_seq', 0)")
    db.execute("select pgqueue.maintain()")
    refused(mine, "enqueue('other')")
    refused(mine, "complete({}, {})".format(*lease(db, "other")), by="PQ002")


def test_another_role_lends_nothing_to_or_from_a_limited_one(
    db, connect: Connect, mine
):
    """Neither a security definer function nor SET ROLE widens what is limited."""
    db.execute(f"create schema own authorization {mine.info.user}")
    mine.execute("""
        create function own.lend() returns bigint language sql security definer
            as $$ select pgqueue.enqueue('other') $$;
        grant usage on schema own to public;
    """)
    db.execute("create role pgqueue_other login")
    try:
        db.execute(f"grant pgqueue_other to {mine.info.user}")
        mine.execute("set role pgqueue_other")
        for caller in mine, connect(user="pgqueue_other"):
            with pytest.raises(errors.InsufficientPrivilege):
                caller.execute("select own.lend()")
    finally:
        mine.execute("reset role")
        db.execute("drop role pgqueue_other")
        db.execute("drop schema own cascade")


@pytest.mark.parametrize("call", ["enqueue('other')", "status(1)", "result(1)"])
def test_maintenance_of_a_table_runs_nothing_with_the_rights_of_who_maintains_it(
    db, mine, call
):
    """ANALYZE runs functions in indexes as the table's owner, in a superuser's session."""
    db.execute("select pgqueue.enqueue('other')")
    db.execute(f"create schema own authorization {mine.info.user}")
    mine.execute(f"""
        create function own.act() returns text language sql
            as $$ select (pgqueue.{call})::text $$;
        create function own.peek(int) returns text language plpgsql immutable as $$
            begin
                return case when current_setting('application_name') = 'pgqueue test'
                    then own.act() end;
            end $$;
        create table own.bait as select n from generate_series(1, 10) as n;
        create index on own.bait (own.peek(n));
    """)
    db.execute("set application_name = 'pgqueue test'")
    with pytest.raises(errors.InsufficientPrivilege, match="security-restricted"):
        db.execute("analyze own.bait")
    db.execute("drop schema own cascade")


def test_a_collation_makes_no_queue_look_like_another(db, mine):
    db.execute("""
        create collation blind (provider = icu, locale = 'und-u-ks-level1', deterministic = false)
    """)
    with pytest.raises(errors.InsufficientPrivilege):
        mine.execute("select pgqueue.enqueue('MINE' collate blind)")


# What producers read.


def test_a_producer_reads_state_result_and_the_first_line_of_an_error(
    db, connect: Connect, role
):
    db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
    caller = connect(user=role)
    id = one(caller, "select pgqueue.enqueue('q', '{\"secret\": 1}')")
    said = "ValueError: no\nTraceback: secret"
    for outcome in "retry", "dead":
        token = one(db, "select token from pgqueue.claim('q', 'w')")
        db.execute(
            "select pgqueue.fail(%s, %s, %s, '0', %s)",
            (id, token, said, outcome == "dead"),
        )
        row = caller.execute("select s::text, s.* from pgqueue.status(%s) as s", (id,))
        row = row.fetchone()
        assert "ValueError: no" in row[0] and "secret" not in row[0]
    assert one(db, "select last_error from pgqueue.status(%s)", id) == said


def test_a_producer_reads_the_last_step_of_a_job_and_the_event_that_it_waits_for(
    db, connect: Connect, role
):
    db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
    caller = connect(user=role)
    id = one(caller, "select pgqueue.enqueue('q', '1')")
    token = one(db, "select token from pgqueue.claim('q', 'w')")
    db.execute("select pgqueue.save_step(%s, %s, 'charge', '2')", (id, token))
    db.execute("select pgqueue.suspend(%s, %s, event => 'paid')", (id, token))
    asked = "select last_step, event, payload, errors from pgqueue.status(%s)"
    assert caller.execute(asked, (id,)).fetchone() == ("charge", "paid", None, None)


@pytest.mark.parametrize("kind", ["reader", "operator"])
def test_whole_errors_and_headers_are_for_operators(db, connect: Connect, role, kind):
    secret = {"is": "secret"}
    db.execute("select pgqueue.grant_access(%s, %s)", (role, kind))
    db.execute(
        "select pgqueue.schedule('s', 'q', every => '1 hour', headers => %s)",
        (Jsonb(secret),),
    )
    db.execute("select pgqueue.create_batch('q', headers => %s)", (Jsonb(secret),))
    id = one(db, "select pgqueue.enqueue('q')")
    token = one(db, "select token from pgqueue.claim('q', 'w')")
    said = "ValueError: no\nTraceback: secret"
    db.execute("select pgqueue.fail(%s, %s, %s)", (id, token, "\n" + said))
    caller = connect(user=role)
    seen = [
        one(caller, f"select headers from pgqueue.{view}")
        for view in ("schedules", "batches")
    ]
    seen += [one(caller, "select ltrim(last_error, E'\\n') from pgqueue.jobs")]
    if kind == "operator":
        assert seen == [secret, secret, said]
    else:
        assert seen == [None, None, "ValueError: no"]
        for view in allowed(RELATIONS, kind):
            shown = column(caller, f"select v::text from pgqueue.{view} as v")
            assert "secret" not in str(shown), view


# Schedules belong to who created them.


def test_nobody_overwrites_the_schedule_of_another(db, connect: Connect, role):
    db.execute("create role pgqueue_ops login")
    try:
        db.execute("select pgqueue.grant_access(%s, 'scheduler')", (role,))
        db.execute("select pgqueue.grant_access('pgqueue_ops', 'operator')")
        app, ops = connect(user=role), connect(user="pgqueue_ops")
        app.execute("select pgqueue.schedule('app', 'q', every => '1 hour')")
        app.execute("select pgqueue.schedule('app', 'q', every => '2 hours')")
        ops.execute("select pgqueue.schedule('ops', 'q', every => '1 hour')")
        refused(app, "schedule('ops', 'mine', every => '1 hour')")
        refused(ops, "schedule('app', 'mine', every => '1 hour')")
        assert column(db, "select every::text from pgqueue.schedule order by name") == [
            "02:00:00", "01:00:00",
        ]  # fmt: skip
        ops.execute("select pgqueue.pause_schedule('app'), pgqueue.unschedule('app')")
        ops.execute("select pgqueue.schedule('app', 'q', every => '1 hour')")
        refused(app, "schedule('app', 'mine', every => '1 hour')")
    finally:
        db.execute("drop owned by pgqueue_ops")
        db.execute("drop role pgqueue_ops")
    # It belongs to nobody any more.
    app.execute("select pgqueue.schedule('app', 'mine', every => '1 hour')")
    assert one(db, "select owner from pgqueue.schedule where name = 'app'") == role


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
@pytest.mark.parametrize("kind", [None, "worker", "scheduler", "operator", "reader"])
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
