-- One job: its progress, what happened to it, and waiting for its end.
--
-- A waiting session listens on the channel pgqueue, and holds shared session locks of the class 7366516:
-- (7366516, 256) for any job, and (7366516, the job's id modulo 256). The end of jobs first deletes
-- them, then checks whether these locks are free (the first one, and only if that is taken the
-- others), and sends a notification only if not. It checks only while a cell says that a session has waited
-- within the last minute; await() writes that cell first of all. So this costs nothing while nobody waits.
--
-- await() takes the locks first, then looks for the job, with a new snapshot. No end is missed:
--   - An end that checks the locks after that finds them, and its notification comes with its commit.
--   - An end that checked before had already deleted the job. If that has committed, the job is gone. If
--     not, the version that is still visible has been deleted, or updated before its successor was deleted:
--     its xmax was set by a transaction other than the one that wrote it. (A claim locks what it updates,
--     and leaves the new version with an xmax equal to its xmin.) As long as the row is locked, await() says
--     to look again soon. It also does so beside a mere lock, which costs some needless looks.
-- A notification may still get lost, because they are off or too many: so look every two seconds anyway.
--
-- As in module wake nothing waits for a lock, and a stranger who holds one only causes needless notifications
-- or looks. When a session ends its locks are gone.

create or replace function pgqueue.progress(
    job_id bigint,
    token bigint,
    done numeric,
    total numeric default null,
    message text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_isolation(),
        case when (done between 0 and 1e18) is not true or total <= 0 or total > 1e18 then array[
            'done must be 0 to 1e18, and total more than 0',
            format('done is %s, total is %s.', coalesce(done::text, 'null'), coalesce(total::text, 'null')),
            'Omit total if it is not known.'
        ] end
    ));
    moment timestamptz := clock_timestamp();
    own text[] := pgqueue._own_queues('worker');
begin
    update pgqueue.job as j
    set progress = row(
        greatest(moment, j.claimed_at),
        trim_scale(round(progress.done, 6)),
        nullif(trim_scale(round(progress.total, 6)), 0),
        -- Its beginning, because to trim a text takes eight times its size.
        nullif(pgqueue._summary(left(progress.message, 8000)), '')
    )
    where j.ctid = any (array(
        select l.ctid
        from pgqueue.job as l
        where l.id = progress.job_id and l.token = progress.token and pgqueue._is_own(l.queue, own)
        for update skip locked
    ));
    -- If it is only locked, because its end has not committed yet, its lease is not lost.
    if not found and not exists (
        select from pgqueue.job as j
        where j.id = progress.job_id and j.token = progress.token and pgqueue._is_own(j.queue, own)
    ) then
        refused := pgqueue._refuse(pgqueue._lost(job_id, token));
    end if;
end;
$$;

comment on function pgqueue.progress(bigint, bigint, numeric, numeric, text) is
'Reports the progress of an attempt: how much is done (0 to 1e18, in units of
your own), of how much in total, and in a line what it is doing. Each call
replaces the previous report; the end of the attempt discards it. The views jobs
and running show it, with the rate and the time left. This never waits: while
an open transaction has locked the job it does nothing.
Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED, 22023 (bad
argument).';

create or replace function pgqueue.status(job_id bigint)
    returns table (
        id bigint, queue text, kind text, state text,
        attempt int, max_attempts int, priority int,
        enqueued_at timestamptz, run_at timestamptz, expires_at timestamptz, claimed_at timestamptz,
        finished_at timestamptz, worker text, done numeric, total numeric, message text, rate numeric,
        time_left interval, result jsonb, last_error text,
        payload jsonb, errors jsonb, last_step text, event text, suspended_at timestamptz
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_bitmapscan = on
as $$
declare
    reads_jobs boolean := has_table_privilege(pgqueue._caller(), 'pgqueue.job', 'select');
    own text[] := pgqueue._own_queues('producer', 'operator');
    last pgqueue.run;
    refused boolean;
begin
    -- In one statement, because the job may be moving from one table to the other.
    return query
    select
        asked.id, coalesce(j.queue, d.queue), coalesce(j.kind, d.kind), coalesce(j.state, 'dead'),
        coalesce(j.attempt, d.attempt), coalesce(j.max_attempts, d.max_attempts),
        coalesce(j.priority, d.priority), coalesce(j.enqueued_at, d.enqueued_at),
        coalesce(j.run_at, d.run_at), j.expires_at,
        coalesce(j.claimed_at, d.claimed_at), d.died_at, coalesce(j.worker, d.worker),
        j.done, j.total, j.message, j.rate, j.time_left, null::jsonb,
        case when reads_jobs then coalesce(j.last_error, d.error)
            else pgqueue._summary(coalesce(j.last_error, d.error))
        end,
        case when reads_jobs then coalesce(w.payload, d.payload) end,
        case when reads_jobs then coalesce(w.errors, d.errors) end,
        coalesce(j.last_step, (
            select s.name from pgqueue.step as s where s.job_id = d.id order by s.place desc, s.saved_at desc limit 1
        )),
        j.event, j.suspended_at
    from (values (status.job_id)) as asked (id)
    left join pgqueue.jobs as j on j.id = asked.id
    left join pgqueue.job as w on w.id = j.id
    left join pgqueue.dead_job as d on d.id = asked.id
    where num_nonnulls(j.id, d.id) > 0 and pgqueue._is_own(coalesce(j.queue, d.queue), own);
    if found then
        return;
    end if;

    last := pgqueue._last_run(job_id);
    refused := pgqueue._refuse(case when last.job_id is null or not pgqueue._is_own(last.queue, own)
        then pgqueue._not_found('job', job_id)
    end);
    id := job_id;
    queue := last.queue;
    kind := last.kind;
    -- If its last run did not end it, the job was discarded or purged later.
    state := case when last.outcome in ('completed', 'cancelled') then last.outcome else 'gone' end;
    attempt := last.attempt;
    finished_at := last.finished_at;
    worker := last.worker;
    if last.worker is not null then
        claimed_at := last.finished_at - last.taken;
        run_at := claimed_at - last.waited;
    end if;
    result := case when state = 'completed' then last.result end;
    last_error := case when state <> 'completed' then coalesce(last.error, last.result #>> '{}') end;
    if reads_jobs then
        payload := last.payload;
        -- In the form of job.errors. Not what was logged later, which may be nearly all; one hour more, since the clock
        -- may have been set back.
        errors := coalesce((
            select jsonb_agg(
                jsonb_build_object('attempt', r.attempt, 'at', r.finished_at, 'worker', r.worker, 'error', r.error)
                order by r.finished_at, r.attempt
            )
            from pgqueue.run as r
            where r.job_id = status.job_id and r.error is not null
                and r.finished_at <= last.finished_at + interval '1 hour'
        ), '[]');
    end if;
    return next;
end;
$$;

comment on function pgqueue.status(bigint) is
'What is known about a job, in one row. Its state is that of the view jobs while
it waits or runs, then dead, completed, cancelled, or gone (discarded or
purged: the row is that of its last attempt). A job that has ended is looked
up in run, which knows neither its priority, when it was enqueued nor its
expires_at: these are null. last_error of a cancelled job is the reason.
A role that may not read the table job (an operator may) gets only the first
line of last_error, and no payload or errors; a producer limited to some queues
gets no jobs of others. errors are the failures, oldest first: attempt, at,
worker, error. Of a job that completed, was cancelled or is gone, they have only
the first line of each error, and payload is null without keep_payloads.
last_step is the last one saved by save_step; event and suspended_at say what it
was suspended for, and when. Only reads.
Raises PQ001 (nothing is known about it).';

create or replace function pgqueue.result(job_id bigint)
    returns jsonb
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    own text[] := pgqueue._own_queues('producer', 'operator');
    last pgqueue.run;
    refused boolean;
begin
    -- In one statement, because the job may be moving from one table to the other.
    perform from pgqueue.job as j where j.id = result.job_id and pgqueue._is_own(j.queue, own)
    union all
    select from pgqueue.dead_job as d where d.id = result.job_id and pgqueue._is_own(d.queue, own);
    if found then
        return null;
    end if;
    last := pgqueue._last_run(job_id);
    refused := pgqueue._refuse(case when last.job_id is null or not pgqueue._is_own(last.queue, own)
        then pgqueue._not_found('job', job_id)
    end);
    return case when last.outcome = 'completed' then last.result end;
end;
$$;

comment on function pgqueue.result(bigint) is
'The result given to complete for a job, which every producer of its queue may
read. Null if there was none, while the job waits or runs, and if it is dead,
cancelled or gone: ask status.
Raises PQ001 (nothing is known about it).';

create or replace function pgqueue.results_of(
    job_id bigint, token bigint, after_id bigint default null, max_rows int default 1000
)
    returns table (id bigint, kind text, outcome text, result jsonb)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_bitmapscan = on
    set enable_sort = on
as $$
declare
    most int := coalesce(max_rows, 1000);
    refused boolean := pgqueue._refuse(case when most not between 1 and 10000 then array[
        'max_rows must be 1 to 10000', format('It is %s.', most), 'Ask for the next ones with after_id.'
    ] end);
    first bigint[];
    batch pgqueue.batch;
    of_batch bigint[] := '{}'::bigint[];
    asked bigint[];
    last bigint;
    span bigint := 4 * most;
    own text[] := pgqueue._own_queues('worker', 'producer', 'operator');
    given int := 0;
    came int;
begin
    select coalesce((j.terms).after, '{}') into first
    from pgqueue.job as j
    where j.id = results_of.job_id and j.token = results_of.token and pgqueue._is_own(j.queue, pgqueue._own_queues('worker'));
    refused := pgqueue._refuse(case when not found then pgqueue._lost(results_of.job_id, results_of.token) end);
    select b.* into batch from pgqueue.batch as b where b.callback_id = results_of.job_id;
    -- Until there are enough, for some may be of queues that this role may not ask about.
    loop
        -- Those of the batch that the log still has. It is in the order of time, nearly that of the ids: a part of it
        -- for each call, and not the whole.
        of_batch := '{}';
        last := greatest(batch.id, after_id);
        while last < batch.callback_id and cardinality(of_batch) < most loop
            of_batch := of_batch || array(
                select distinct r.job_id
                from pgqueue.run as r
                where r.job_id > last and r.job_id <= last + span and r.job_id < batch.callback_id
                    and r.options -> 'batch_id' = to_jsonb(batch.id) and r.outcome in ('completed', 'dead', 'cancelled')
                order by r.job_id
                limit most
            );
            last := last + span;
            span := 4 * span;
        end loop;
        asked := array(
            select u.id
            from (select unnest(first) union select unnest(of_batch)) as u (id)
            where u.id > coalesce(after_id, 0)
            order by u.id
            limit most
        );
        return query
        with ended as materialized (
            select distinct on (r.job_id) r.job_id, r.queue, r.kind, r.result
            from pgqueue.run as r
            where r.job_id between asked[1] and asked[cardinality(asked)] and r.job_id = any (asked)
                and r.outcome in ('completed', 'dead', 'cancelled')
            -- As in _last_run.
            order by r.job_id, r.outcome = 'dead', r.finished_at desc
        )
        select o.id, coalesce(l.kind, p.kind), o.outcome, case when o.outcome = 'completed' then l.result end
        from pgqueue._outcomes_of(asked) as o
        left join ended as l on l.job_id = o.id
        left join lateral (
            select d.queue, d.kind from pgqueue.dead_job as d where d.id = o.id
            union all
            select j.queue, j.kind from pgqueue.job as j where j.id = o.id
            limit 1
        ) as p on true
        -- Of one that the log has forgotten, no queue is known.
        where (own is null or coalesce(l.queue, p.queue) = any (own)) is not false
        order by o.id
        limit most - given;
        get diagnostics came = row_count;
        given := given + came;
        exit when given >= most or cardinality(asked) < most;
        after_id := asked[most];
    end loop;
end;
$$;

comment on function pgqueue.results_of(bigint, bigint, bigint, int) is
'For a running job: how the jobs that it was enqueued after, or suspended for,
have ended (completed, dead or cancelled; null for one that waits or runs), and
the results of those that completed, as long as the log keeps them (keep_runs).
For the callback of a batch, its jobs that the log still has. In the order of
their ids, from after_id on, at most max_rows (1 to 10,000): for more, ask
again with the last id. A worker limited to some queues sees only jobs of
these, and of queues whose results it may ask for.
Raises PQ002 when the lease is lost, 22023 (bad argument).';

-- From now on the end of this job notifies this session. Returns false if another session holds the locks exclusively.
create or replace function pgqueue._await(job_id bigint)
    returns boolean
    language plpgsql
as $$
declare
    noted text := coalesce(current_setting('pgqueue.awaited', true), '');
    note text := format(' %s ', job_id & 255);
    bit bigint := (select pgqueue._settings_bits(j.queue) from pgqueue.job as j where j.id = job_id);
    is_heard boolean;
begin
    if (
        pg_sequence_last_value('pgqueue._cell_awaited') > pgqueue._since_2020(clock_timestamp() + interval '30 seconds')
        and (pg_sequence_last_value('pgqueue.awaited_seq') & bit <> 0) is not false
    ) is not true then
        if current_setting('transaction_read_only') = 'on' then
            return false;
        end if;
        perform pgqueue._mark(coalesce(bit, 0), 'pgqueue.awaited_seq');
        perform setval('pgqueue._cell_awaited', pgqueue._since_2020(clock_timestamp() + interval '1 minute'));
    end if;
    -- Saves a look into pg_locks, most of the cost. A rollback may bring back the note of locks that were
    -- released since: then no notification comes, and a look every two seconds finds the end.
    if position(note in noted) > 0 then
        return true;
    end if;
    -- Each once, because each has to be released as often as it was taken.
    select bool_and(case when a.key is null then pg_try_advisory_lock_shared(7366516, k.key) else true end)
    into is_heard
    from unnest(array[256, (job_id & 255)::int]) as k (key)
    left join pgqueue._own_locks(7366516) as a (key) on a.key = k.key;
    if is_heard then
        perform set_config('pgqueue.awaited', noted || note, false);
    end if;
    return is_heard;
end;
$$;

-- Ends what _await began, for all jobs.
create or replace function pgqueue._stop_awaiting()
    returns void
    language plpgsql
as $$
begin
    perform pg_advisory_unlock_shared(7366516, l.key) from pgqueue._own_locks(7366516) as l (key);
    perform set_config('pgqueue.awaited', '', false);
end;
$$;

create or replace function pgqueue.await(job_id bigint)
    returns interval
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    refused boolean := pgqueue._refuse(case when job_id is not null then pgqueue._check_isolation() end);
    own text[];
    last pgqueue.run;
    is_heard boolean;
    is_changing boolean;
begin
    if job_id is null then
        perform pgqueue._stop_awaiting();
        return null;
    end if;
    own := pgqueue._own_queues('producer', 'operator');
    is_heard := pgqueue._await(job_id);
    select j.xmax <> '0'::xid and j.xmax <> j.xmin into is_changing
    from pgqueue.job as j
    where j.id = await.job_id and pgqueue._is_own(j.queue, own);
    if found then
        is_changing := is_changing
            and (current_setting('transaction_read_only') = 'on' or not pgqueue._is_left_alone(job_id));
        return case when is_heard and not is_changing then interval '2 seconds' else interval '50 milliseconds' end;
    end if;
    perform from pgqueue.dead_job as d where d.id = await.job_id and pgqueue._is_own(d.queue, own);
    if not found then
        last := pgqueue._last_run(job_id);
        if last.job_id is null or not pgqueue._is_own(last.queue, own) then
            perform pgqueue._stop_awaiting();
            refused := pgqueue._refuse(pgqueue._not_found('job', job_id));
        end if;
    end if;
    return interval '0';
-- After an interrupted await() the session does not wait for any job.
exception when query_canceled or lock_not_available or insufficient_resources or program_limit_exceeded then
    perform pgqueue._stop_awaiting();
    raise;
end;
$$;

comment on function pgqueue.await(bigint) is
'For a session that has run LISTEN pgqueue and waits for a job to end: returns
how long it may sleep, unless the notification "end" comes first; then call it
again. Zero: the job has completed, died, been cancelled or removed. From now
on the ends of such jobs notify this session, until it calls await(null); it
may await several jobs. NOTIFY is a hint, so look again when the time is over.
Behind a transaction pooler no notification arrives, and the locks that this
takes would be left behind: poll status instead.
Raises PQ001 (nothing is known about it), 25001 outside READ COMMITTED.';
