-- What an operator does to waiting, running or ended jobs, from psql. No worker needs to be running.

-- Cancels jobs: asks running ones to stop, and ends the others. All in one call, because a job that waits for
-- another of them is cancelled along with it. Returns how many exist, and how many of these are running.
create or replace function pgqueue._cancel(job_ids bigint[], reason text, out jobs int, out running int)
    language plpgsql
    set enable_tidscan = on
as $$
declare
    moment timestamptz := clock_timestamp();
    asked record;
begin
    with asked as (
        update pgqueue.job as j
        set cancelled_at = coalesce(j.cancelled_at, moment),
            cancel_reason = coalesce(left(_cancel.reason, 8000), j.cancel_reason)
        where j.id = any (job_ids)
        returning j.ctid, j.queue, coalesce(j.lease_expires_at > moment, false) as is_running
    )
    select
        count(*) as jobs,
        coalesce(array_agg(a.ctid) filter (where not a.is_running), '{}') as picks,
        array_agg(distinct a.queue) filter (where a.is_running) as queues
    into asked
    from asked as a;
    jobs := asked.jobs;
    -- A job whose lease has expired may still be running in work(), which keeps its row locked.
    asked.picks := array(select j.ctid from pgqueue.job as j where j.ctid = any (asked.picks) for update skip locked);
    running := jobs - cardinality(asked.picks);
    perform pgqueue._notify(q.name, 'cancel') from unnest(asked.queues) as q (name);
    perform pgqueue._end(asked.picks, array_fill('cancelled'::text, array[jobs - running]), null, null, moment);
end;
$$;

create or replace function pgqueue.cancel(job_id bigint, reason text default null)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    asked record := pgqueue._cancel(array[job_id], reason);
    refused boolean := pgqueue._refuse(case when asked.jobs = 0 then pgqueue._not_found(
        'job', job_id, 'It may have finished, or be dead: look in pgqueue.run and pgqueue.dead_job.'
    ) end);
begin
    return case asked.running when 0 then 'cancelled' else 'cancelling' end;
end;
$$;

comment on function pgqueue.cancel(bigint, text) is
'Stops a job; it never runs again. Returns cancelled for a waiting job, which is
deleted at once, or cancelling for a running one: its worker learns of it from a
notification or at its next heartbeat; if the worker is dead, the job ends with
its lease.
Raises PQ001 (no such job).';

-- For a dry run: reports in NOTICEs how often each error occurs, for the 20 most frequent ones.
create or replace function pgqueue._tell_counts(what text, summaries text[])
    returns void
    language plpgsql
as $$
declare
    counted record;
begin
    for counted in
        select s.summary, count(*) as jobs
        from unnest(summaries) as s (summary)
        group by s.summary
        order by count(*) desc, s.summary
        limit 20
    loop
        raise notice '% of %: %', counted.jobs, what, coalesce(counted.summary, 'no error');
    end loop;
end;
$$;

create or replace function pgqueue.cancel_many(
    queue text default null,
    kind text default null,
    error_like text default null,
    enqueued_after timestamptz default null,
    enqueued_before timestamptz default null,
    max_jobs int default 1000,
    dry_run boolean default false,
    reason text default null
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
    set enable_sort = off
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_ranges(max_jobs => max_jobs, error_like => error_like));
    -- Jobs that are being claimed or ended right now are left alone, but not those whose handlers work in a transaction:
    -- that only shares the key of the row (_hold, save_step).
    job_ids bigint[] := array(
        select j.id
        from pgqueue.job as j
        where (cancel_many.queue is null or j.queue = cancel_many.queue)
            and (cancel_many.kind is null or j.kind = cancel_many.kind)
            and (
                cancel_many.error_like is null
                or pgqueue._summary(j.errors -> -1 ->> 'error') ilike cancel_many.error_like collate "default"
            )
            and (cancel_many.enqueued_after is null or j.enqueued_at >= cancel_many.enqueued_after)
            and (cancel_many.enqueued_before is null or j.enqueued_at < cancel_many.enqueued_before)
            and j.cancelled_at is null
        order by j.id
        limit coalesce(cancel_many.max_jobs, 1000)
        for no key update skip locked
    );
begin
    if dry_run then
        perform pgqueue._tell_counts('the jobs to cancel', array(
            select pgqueue._summary(j.errors -> -1 ->> 'error')
            from pgqueue.job as j where j.id = any (job_ids)
        ));
    else
        perform pgqueue._cancel(job_ids, reason);
    end if;
    return query select c.id from unnest(job_ids) as c (id);
end;
$$;

comment on function pgqueue.cancel_many(text, text, text, timestamptz, timestamptz, int, boolean, text) is
'Cancels waiting or running jobs, lowest id first, and returns their ids. Filters
by queue, kind, pattern of the first line of the last error (ILIKE) and time
of enqueue (from enqueued_after, before enqueued_before); null does not
filter. dry_run only returns the ids, and reports in NOTICEs how often each
error occurs.
Raises 22023 (bad argument).';

create or replace function pgqueue.run_now(job_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    moved record;
    refused boolean;
begin
    update pgqueue.job as j
    set run_at = case
            when j.lease_expires_at is null and j.run_at < 'infinity' then least(j.run_at, moment)
            else j.run_at
        end
    where j.id = run_now.job_id
    returning j.queue, j.priority, j.group_key, j.run_at, j.token into moved;
    if not found then
        refused := pgqueue._refuse(pgqueue._not_found('job', job_id, 'A dead job goes back to work with redrive_job.'));
    end if;
    -- Checked only now that this transaction has the row locked.
    if moved.token is null and exists (select from pgqueue.wait as w where w.job_id = run_now.job_id) then
        insert into pgqueue.step as s (job_id, saved_at, place, name, value)
        select
            w.job_id, moment,
            coalesce((
                select l.place from pgqueue.step as l where l.job_id = w.job_id order by l.place desc limit 1
            ), 0) + 1,
            w.step, '"run_now"'
        from pgqueue.wait as w
        where w.job_id = run_now.job_id and w.step is not null
        on conflict do nothing;
        perform pgqueue._free(array[job_id]);
        return;
    end if;
    perform pgqueue._reopened(array[moved.queue], array[moved.priority], array[moved.group_key], array[moved.run_at]);
end;
$$;

comment on function pgqueue.run_now(bigint) is
'Makes a scheduled job, one that waits for its retry, or a suspended one, due at
once; a running job, or one enqueued after others, is left alone. This ends the
wait of a suspended job: if suspend was given a step, it is saved with the value
"run_now"; otherwise the job cannot tell, and may wait again.
Raises PQ001 (no such job).';

create or replace function pgqueue.reprioritize(job_id bigint, priority int)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    refused boolean := pgqueue._refuse(case when priority is null
        then array['priority must not be null', 'It is null.', 'The default is 0.']
        else pgqueue._check_ranges(priority)
    end);
    moved record;
begin
    update pgqueue.job as j
    set priority = reprioritize.priority
    where j.id = reprioritize.job_id
    returning j.queue, j.group_key, j.run_at into moved;
    if not found then
        refused := pgqueue._refuse(pgqueue._not_found('job', job_id, 'Only a waiting or running job has a priority.'));
    end if;
    perform pgqueue._reopened(array[moved.queue], array[priority], array[moved.group_key], array[moved.run_at]);
end;
$$;

comment on function pgqueue.reprioritize(bigint, int) is
'Gives a job another priority, -100 to 100; larger runs first. For a running job
it takes effect at the next attempt.
Raises PQ001 (no such job), 22023 (bad argument).';

create or replace function pgqueue.rerun(job_id bigint)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    present record;
    last pgqueue.run;
    refused boolean;
begin
    -- In one statement, because the job may be moving from one table to the other.
    select j.id as living, d.id as dead into present
    from (values (rerun.job_id)) as asked (id)
    left join pgqueue.job as j on j.id = asked.id
    left join pgqueue.dead_job as d on d.id = asked.id;
    select r.* into last
    from pgqueue.run as r
    where r.job_id = rerun.job_id and r.payload is not null
    order by r.finished_at desc
    limit 1;
    refused := pgqueue._refuse(coalesce(
        case
            when present.living is not null then array[
                format('job %s has not ended', job_id),
                'It is waiting or running.',
                format('why(%s) says what it waits for, run_now(%1$s) makes it due.', job_id)
            ]
            when present.dead is not null then array[
                format('job %s is dead', job_id),
                'It is in dead_job, with its payload.',
                format('redrive_job(%s) sends it back to work.', job_id)
            ]
            when last.job_id is null then array[
                format('job %s cannot be run again', coalesce(job_id::text, 'null')),
                'The log has no payload of a job with this id.',
                'If keep_payloads is set for its queue, the log keeps the payloads of jobs that end from then on.',
                'PQ001'
            ]
        end,
        pgqueue._check_payload(
            last.payload, (pgqueue._in_force(last.queue, last.kind, last.options ->> 'group_key')).max_payload_bytes
        )
    ));
    return pgqueue._enqueue_again(
        last.queue, last.payload, last.kind, (last.options ->> 'priority')::int,
        (last.options ->> 'max_attempts')::int, last.options ->> 'group_key',
        coalesce(last.headers, '{}') || jsonb_build_object('rerun_of', job_id)
    );
end;
$$;

comment on function pgqueue.rerun(bigint) is
'Enqueues a job that completed or was cancelled once more, due now, and returns
the new id. Queue, kind, payload, priority, max_attempts, group and headers are
the old ones, with the old id as the header rerun_of; a unique_key is not
copied. The log must have kept the payload: see keep_payloads.
Raises PQ001 (no such job, or no payload of it), 22023 (it has not ended, or is
dead), 54000 (payload too large).';

create or replace function pgqueue.purge(queue text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_hashagg = off
as $$
declare
    -- In a statement of its own, because it may wait: the next one then sees what has changed meanwhile. If the
    -- two were joined, the plan might compare every job with every other.
    picks tid[] := array(
        select j.ctid
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(purge.queue collate "default") and j.queue = purge.queue
            and j.lease_expires_at is null
        order by j.id
        for update
    );
    purged record;
    jobs bigint := 0;
begin
    for purged in
        with deleted as (
            delete from pgqueue.job as j
            where j.ctid = any (picks)
            returning j.id, j.group_key, j.permits, (j.terms).batch_id
        )
        -- Ten thousand at a time, because an array may not exceed 1 GB. But first all of batches together: they are
        -- counted before any batch is looked at, which then has no other job left.
        select
            array_agg(row(
                d.id, 'cancelled', purge.queue, d.group_key, d.batch_id, d.permits, null, null, null
            )::pgqueue._ended) as ended
        from (
            select n.*, case when n.batch_id is null then 1 + row_number() over (order by n.id) / 10000 else 0 end as part
            from deleted as n
        ) as d
        group by d.part
        order by d.part
    loop
        perform pgqueue._after_end(purged.ended);
        jobs := jobs + cardinality(purged.ended);
    end loop;
    return jobs;
end;
$$;

comment on function pgqueue.purge(text) is
'Deletes all waiting jobs of a queue, without a trace in run; running and dead
jobs stay. Returns how many.';
