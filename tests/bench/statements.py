"""Each system as the SQL that its own documentation recommends, and bare SQL beside it."""

from collections.abc import Callable
from dataclasses import dataclass

PAYLOAD = '{"user": 4711, "template": "welcome", "to": "ada@example.org"}'
PAYLOADS = f"array(select '{PAYLOAD}'::jsonb from generate_series(1, {{n}}))"


@dataclass(frozen=True)
class Statements:
    """One queue, driven by SQL alone; what a system has no functions for is empty.

    enqueue is one job in one statement; bulk adds {n} jobs in one, and tomorrow {n} that
    are due tomorrow, at a higher priority where there is such a thing. lifecycle(batch) is
    a pgbench script that takes a batch and finishes it, in two transactions, for one of
    `batches`; take, of {n}, and finish do the same for a client: take returns rows whose
    columns, as arrays, are what finish is given, and extend, the heartbeat. copy reads
    payloads; expired counts the leases that ran out, where there is a log of them. notify
    and quiet switch the notification of workers on and off, where that is not the
    system's own affair; idle is what the session of an idle worker says to be notified.
    """

    enqueue: str
    depth: str
    reset: str
    bulk: str = ""
    copy: str = ""
    tomorrow: str = ""
    lifecycle: Callable[[int], str] = lambda batch: ""
    batches: tuple[int, ...] = ()
    take: str = ""
    finish: str = ""
    extend: str = ""
    expired: str = ""
    notify: str = ""
    quiet: str = ""
    idle: str = ""


def pgqueue_lifecycle(batch: int) -> str:
    if batch == 1:
        return (
            "select id, token from pgqueue.claim('bench', 'w') \\gset\n"
            "select pgqueue.complete(:id, :token);\n"
        )
    return (
        "select string_agg(id::text, ',') as ids, string_agg(token::text, ',') as tokens "
        f"from pgqueue.claim('bench', 'w', {batch}) \\gset\n"
        "select count(*) from pgqueue.complete_many('{:ids}', '{:tokens}');\n"
    )


PGQUEUE = Statements(
    enqueue=f"select pgqueue.enqueue('bench', '{PAYLOAD}')",
    depth="select count(*) from pgqueue.job",
    reset="truncate pgqueue.job, pgqueue.run",
    bulk=f"select count(*) from pgqueue.enqueue_many('bench', {PAYLOADS})",
    tomorrow=(
        f"select count(*) from pgqueue.enqueue_many('bench', {PAYLOADS}, "
        "priority => 9, run_at => now() + interval '1 day')"
    ),
    lifecycle=pgqueue_lifecycle,
    batches=(1, 50),
    take="select id, token from pgqueue.claim('bench', 'w', {n})",
    finish="select count(*) from pgqueue.complete_many(%s, %s)",
    extend="select count(*) from pgqueue.extend(%s, %s)",
    expired="select count(*) from pgqueue.run where outcome = 'expired'",
    idle="listen pgqueue; select pgqueue.rest(array['bench'])",
)


def pgmq_lifecycle(batch: int) -> str:
    if batch == 1:
        return (
            "select msg_id from pgmq.read('bench', 30, 1) \\gset\n"
            "select pgmq.delete('bench', :msg_id::bigint);\n"
        )
    return (
        "select string_agg(msg_id::text, ',') as ids "
        f"from pgmq.read('bench', 30, {batch}) \\gset\n"
        "select count(*) from pgmq.delete('bench', '{:ids}'::bigint[]);\n"
    )


PGMQ = Statements(
    enqueue=f"select pgmq.send('bench', '{PAYLOAD}')",
    depth="select coalesce(sum(queue_length), 0) from pgmq.metrics_all()",
    reset="truncate pgmq.q_bench",
    bulk=f"select count(*) from pgmq.send_batch('bench', {PAYLOADS})",
    tomorrow=f"select count(*) from pgmq.send_batch('bench', {PAYLOADS}, 86400)",
    lifecycle=pgmq_lifecycle,
    batches=(1, 50),
    take="select msg_id from pgmq.read('bench', 30, {n})",
    finish="select count(*) from pgmq.delete('bench', %s::bigint[])",
    extend="select count(*) from pgmq.set_vt('bench', %s::bigint[], 30)",
    notify="select pgmq.enable_notify_insert('bench', 0)",
    quiet="select pgmq.disable_notify_insert('bench')",
    idle='listen "pgmq.q_bench.INSERT"',
)

GRAPHILE_WORKER = Statements(
    enqueue=f"select graphile_worker.add_job('bench', '{PAYLOAD}')",
    depth="select count(*) from graphile_worker._private_jobs",
    reset="truncate graphile_worker._private_jobs",
    idle='listen "jobs:insert"',
)

PROCRASTINATE = Statements(
    enqueue=(
        "select procrastinate_defer_jobs_v1(array[row('bench', 'bench', 0, null, null, "
        f"'{PAYLOAD}', null)]::procrastinate_job_to_defer_v1[])"
    ),
    depth="select count(*) from procrastinate_jobs",
    reset="truncate procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers",
    bulk=(
        "select cardinality(procrastinate_defer_jobs_v1(array(select row('bench', 'bench', "
        f"0, null, null, '{PAYLOAD}', null)::procrastinate_job_to_defer_v1 "
        "from generate_series(1, {n}))))"
    ),
    lifecycle=lambda batch: (
        "select id from procrastinate_fetch_job_v2('{bench}', null) \\gset\n"
        "select procrastinate_finish_job_v1(:id, 'succeeded', true);\n"
    ),
    batches=(1,),
    idle='listen "procrastinate_queue_v1#bench"',
)

BARE = Statements(
    enqueue=f"insert into bare (payload) values ('{PAYLOAD}')",
    depth="select count(*) from bare",
    reset=(
        "create table if not exists bare ("
        "id bigint generated always as identity primary key, payload jsonb);"
        "truncate bare"
    ),
    bulk=f"insert into bare (payload) select '{PAYLOAD}' from generate_series(1, {{n}})",
    copy="copy bare (payload) from stdin",
    lifecycle=lambda batch: (
        "delete from bare where ctid = any (array("
        f"select ctid from bare order by id limit {batch} for update skip locked)) "
        "returning id;\n"
    ),
    batches=(1, 50),
)

# Jobs straight into the tables of those whose bulk enqueue would take minutes for a
# million; {n} of them, due in {delay}; {high} where they are to be more urgent.
FILL = {
    "graphile-worker": (
        "insert into graphile_worker._private_jobs (task_id, payload, priority, run_at) "
        "select (select min(id) from graphile_worker._private_tasks), "
        "json_build_object('n', n), -({high}), now() + '{delay}' "
    ),
    "pg-boss": (
        "insert into pgboss.job (name, data, policy, priority, start_after) "
        "select 'bench', jsonb_build_object('n', n), 'standard', {high}, now() + '{delay}' "
    ),
    "pgqueuer": (
        "insert into pgqueuer (priority, execute_after, status, entrypoint, payload) "
        "select {high}, now() + '{delay}', 'queued', 'bench', "
        "convert_to(jsonb_build_object('n', n)::text, 'utf8') "
    ),
    "procrastinate": (
        "insert into procrastinate_jobs (queue_name, task_name, priority, args, scheduled_at) "
        "select 'bench', 'bench', {high}, jsonb_build_object('n', n), "
        "nullif(now() + '{delay}', now()) "
    ),
    "chancy": (
        "insert into chancy_jobs (id, queue, func, kwargs, priority, scheduled_at) "
        "select gen_random_uuid(), 'default', '__main__.bench', "
        "jsonb_build_object('n', n), {high}, now() + '{delay}' "
    ),
}


def fill(name: str, jobs: int, tomorrow: bool) -> str:
    """Add numbered jobs, without triggers: due now, or tomorrow and more urgent."""
    insert = FILL[name].format(
        high=9 if tomorrow else 0, delay="1 day" if tomorrow else "0"
    )
    return (
        f"set session_replication_role = replica; {insert}"
        f"from generate_series(0, {jobs - 1}) as g (n); reset session_replication_role"
    )
