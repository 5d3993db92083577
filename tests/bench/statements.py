"""All SQL that drives a system: its own functions where it has some, else its tables."""

from dataclasses import dataclass

PAYLOAD = '{"user": 4711, "template": "welcome", "to": "ada@example.org"}'
PAYLOADS = f"array(select '{PAYLOAD}'::jsonb from generate_series(1, {{n}}))"


def sized(statement: str, jobs: int) -> str:
    """Fill in the number; other braces are JSON's."""
    return statement.replace("{n}", str(jobs))


@dataclass(frozen=True)
class Statements:
    """One queue, "bench", driven by SQL alone; what a system has no functions for is empty.

    depth counts the unfinished jobs, and reset removes all. enqueue is one job in one
    statement; bulk adds {n} jobs in one, and tomorrow {n} that are due tomorrow, at a
    higher priority where there is such a thing; copy reads payloads. claim, of {n} if it
    can, returns rows of `key`; complete_one takes one such row as variables of pgbench,
    complete and extend, the heartbeat, the columns of many as arrays. expired counts the
    leases that ran out, where there is a log of them. notify and quiet switch the
    notification of workers on and off, where that is not the system's own affair; idle is
    what the session of an idle worker says to be notified. insert adds jobs numbered n,
    due in {delay}, more urgent if {high}: for those whose own way would take minutes for
    a million.
    """

    depth: str
    reset: str
    enqueue: str = ""
    bulk: str = ""
    tomorrow: str = ""
    copy: str = ""
    claim: str = ""
    key: tuple[str, ...] = ()
    complete_one: str = ""
    complete: str = ""
    extend: str = ""
    expired: str = ""
    notify: str = ""
    quiet: str = ""
    idle: str = ""
    insert: str = ""

    def lifecycle(self, batch: int) -> str:
        """A pgbench script that claims a batch and completes it, in two transactions."""
        claim = sized(self.claim, batch)
        if not self.complete_one:
            return f"{claim};\n"
        if batch == 1:
            return f"{claim} \\gset\n{self.complete_one};\n"
        arrays = ", ".join(f"string_agg({c}::text, ',') as {c}" for c in self.key)
        complete = self.complete % tuple(f"'{{:{column}}}'" for column in self.key)
        return f"select {arrays} from ({claim}) as c \\gset\n{complete};\n"

    def fill(self, jobs: int, tomorrow: bool) -> str:
        """Add numbered jobs, without triggers: due now, or tomorrow and more urgent."""
        insert = self.insert.format(
            high=9 if tomorrow else 0, delay="1 day" if tomorrow else "0"
        )
        return (
            f"set session_replication_role = replica; {insert}"
            f"from generate_series(0, {jobs - 1}) as g (n); reset session_replication_role"
        )


PGQUEUE = Statements(
    depth="select count(*) from pgqueue.job",
    reset="truncate pgqueue.job, pgqueue.run, pgqueue.step, pgqueue.event",
    enqueue=f"select pgqueue.enqueue('bench', '{PAYLOAD}')",
    bulk=f"select count(*) from pgqueue.enqueue_many('bench', {PAYLOADS})",
    tomorrow=(
        f"select count(*) from pgqueue.enqueue_many('bench', {PAYLOADS}, "
        "priority => 9, run_at => now() + interval '1 day')"
    ),
    claim="select id, token from pgqueue.claim('bench', 'w', {n})",
    key=("id", "token"),
    complete_one="select pgqueue.complete(:id, :token)",
    complete="select count(*) from pgqueue.complete_many(%s, %s)",
    extend="select count(*) from pgqueue.extend(%s, %s)",
    expired="select count(*) from pgqueue.run where outcome = 'expired'",
    idle="listen pgqueue; select pgqueue.rest(array['bench'])",
)

ABSURD = Statements(
    depth="select count(*) from absurd.t_bench where state not in ('completed', 'failed', 'cancelled')",
    reset="select absurd.drop_queue('bench'), absurd.create_queue('bench')",
)

DBOS = Statements(
    depth="select count(*) from dbos.workflow_status where status in ('ENQUEUED', 'PENDING')",
    reset="truncate dbos.workflow_status, dbos.operation_outputs, dbos.notifications cascade",
)

# Every real install has a setting, a schedule and a limit, if of another queue.
BESIDES = """
select pgqueue.configure('other', max_attempts => 3, retry_base => '1 second');
select pgqueue.configure('limited', group_limit => 1, max_running => 10);
select pgqueue.schedule('nightly', 'other', cron => '0 3 1 1 *');
"""

PGMQ = Statements(
    depth="select coalesce(sum(queue_length), 0) from pgmq.metrics_all()",
    reset="truncate pgmq.q_bench",
    enqueue=f"select pgmq.send('bench', '{PAYLOAD}')",
    bulk=f"select count(*) from pgmq.send_batch('bench', {PAYLOADS})",
    tomorrow=f"select count(*) from pgmq.send_batch('bench', {PAYLOADS}, 86400)",
    claim="select msg_id from pgmq.read('bench', 30, {n})",
    key=("msg_id",),
    complete_one="select pgmq.delete('bench', :msg_id::bigint)",
    complete="select count(*) from pgmq.delete('bench', %s::bigint[])",
    extend="select count(*) from pgmq.set_vt('bench', %s::bigint[], 30)",
    notify="select pgmq.enable_notify_insert('bench', 0)",
    quiet="select pgmq.disable_notify_insert('bench')",
    idle='listen "pgmq.q_bench.INSERT"',
)

GRAPHILE_WORKER = Statements(
    depth="select count(*) from graphile_worker._private_jobs",
    reset="truncate graphile_worker._private_jobs",
    enqueue=f"select graphile_worker.add_job('bench', '{PAYLOAD}')",
    idle='listen "jobs:insert"',
    insert=(
        "insert into graphile_worker._private_jobs (task_id, payload, priority, run_at) "
        "select (select min(id) from graphile_worker._private_tasks), "
        "json_build_object('n', n), -({high}), now() + '{delay}' "
    ),
)

PG_BOSS = Statements(
    depth=(
        "select count(*) from pgboss.job "
        "where name in ('bench', 'bench-notify', 'bench-groups') and state < 'completed'"
    ),
    reset="truncate pgboss.job",
    insert=(
        "insert into pgboss.job (name, data, policy, priority, start_after) "
        "select 'bench', jsonb_build_object('n', n), 'standard', {high}, now() + '{delay}' "
    ),
)

PGQUEUER = Statements(
    depth="select count(*) from pgqueuer where status in ('queued', 'picked')",
    reset="truncate pgqueuer, pgqueuer_log, pgqueuer_statistics",
    insert=(
        "insert into pgqueuer (priority, execute_after, status, entrypoint, payload) "
        "select {high}, now() + '{delay}', 'queued', 'bench', "
        "convert_to(jsonb_build_object('n', n)::text, 'utf8') "
    ),
)

PROCRASTINATE = Statements(
    depth="select count(*) from procrastinate_jobs where status in ('todo', 'doing')",
    reset="truncate procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers",
    enqueue=(
        "select procrastinate_defer_jobs_v1(array[row('bench', 'bench', 0, null, null, "
        f"'{PAYLOAD}', null)]::procrastinate_job_to_defer_v1[])"
    ),
    bulk=(
        "select cardinality(procrastinate_defer_jobs_v1(array(select row('bench', 'bench', "
        f"0, null, null, '{PAYLOAD}', null)::procrastinate_job_to_defer_v1 "
        "from generate_series(1, {n}))))"
    ),
    claim="select id from procrastinate_fetch_job_v2('{bench}', null)",
    key=("id",),
    complete_one="select procrastinate_finish_job_v1(:id, 'succeeded', true)",
    idle='listen "procrastinate_queue_v1#bench"',
    insert=(
        "insert into procrastinate_jobs (queue_name, task_name, priority, args, scheduled_at) "
        "select 'bench', 'bench', {high}, jsonb_build_object('n', n), "
        "nullif(now() + '{delay}', now()) "
    ),
)

CHANCY = Statements(
    depth="select count(*) from chancy_jobs where state not in ('succeeded', 'failed')",
    reset="truncate chancy_jobs",
    insert=(
        "insert into chancy_jobs (id, queue, func, kwargs, priority, scheduled_at) "
        "select gen_random_uuid(), 'default', '__main__.bench', "
        "jsonb_build_object('n', n), {high}, now() + '{delay}' "
    ),
)

# What its migrations have left in its 200 tables, to begin anew with.
AWA_SAVE = """
do $$
declare
    name name;
    is_filled boolean;
begin
    create schema saved;
    for name in
        select c.relname from pg_class as c
        where c.relnamespace = 'awa'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
    loop
        execute format('select exists (select from awa.%I)', name) into is_filled;
        if is_filled then
            execute format('create table saved.%1$I as table awa.%1$I', name);
        end if;
    end loop;
end $$
"""
AWA = Statements(
    depth=(
        "select (select count(*) from awa.deferred_jobs) + (select count(*) from awa.ready_entries as r "
        "join awa.queue_claim_heads as h using (queue, priority, enqueue_shard) "
        "where r.lane_seq >= awa.sequence_next_value(h.seq_name))"
    ),
    reset="""
do $$
declare
    name name;
begin
    execute (
        select 'truncate ' || string_agg('awa.' || quote_ident(c.relname), ', ') from pg_class as c
        where c.relnamespace = 'awa'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
    );
    for name in select c.relname from pg_class as c where c.relnamespace = 'saved'::regnamespace loop
        execute format('insert into awa.%1$I overriding system value select * from saved.%1$I', name);
    end loop;
end $$
""",
)

BARE = Statements(
    depth="select count(*) from bare",
    reset=(
        "create table if not exists bare ("
        "id bigint generated always as identity primary key, payload jsonb);"
        "truncate bare"
    ),
    enqueue=f"insert into bare (payload) values ('{PAYLOAD}')",
    bulk=f"insert into bare (payload) select '{PAYLOAD}' from generate_series(1, {{n}})",
    copy="copy bare (payload) from stdin",
    claim=(
        "delete from bare where ctid = any (array("
        "select ctid from bare order by id limit {n} for update skip locked)) returning id"
    ),
    key=("id",),
)
