-- The operator's room: what one types into psql when something is wrong, and the
-- settings. Nothing here needs a worker to be running.

create or replace function pgqueue._not_found(what text, id bigint, hint text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ001',
        message = format('%s %s not found', _not_found.what, coalesce(_not_found.id::text, 'null')),
        hint = _not_found.hint;
end;
$$;

comment on function pgqueue._not_found(text, bigint, text) is 'Raises PQ001.';

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
    moment timestamptz := clock_timestamp();
    pick tid;
    is_running boolean;
begin
    update pgqueue.job as j
    set cancelled_at = coalesce(j.cancelled_at, moment),
        cancel_reason = coalesce(left(cancel.reason, 8000), j.cancel_reason)
    where j.id = cancel.job_id
    returning j.ctid, j.lease_expires_at > moment into pick, is_running;
    if not found then
        perform pgqueue._not_found(
            'job', job_id, 'It may have finished, or be dead: look into pgqueue.run and pgqueue.dead_job.'
        );
    end if;

    if is_running then
        return 'cancelling';
    end if;
    perform pgqueue._end(array[pick], array['cancelled'], null, null, moment);
    return 'cancelled';
end;
$$;

comment on function pgqueue.cancel(bigint, text) is
'Stops a job. One that waits is gone at once: cancelled. The worker of one that runs hears of it at its next heartbeat: cancelling; if that worker is dead the job ends when its lease does. Raises PQ001.';

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
    queue text;
    lane int;
begin
    update pgqueue.job as j
    set run_at = case
            when j.lease_expires_at is null and j.run_at < 'infinity' then least(j.run_at, moment)
            else j.run_at
        end
    where j.id = run_now.job_id
    returning j.queue, j.priority into queue, lane;
    if not found then
        perform pgqueue._not_found('job', job_id, 'A dead job goes back to work with redrive_job.');
    end if;
    perform pgqueue._reopened(array[queue], array[lane]);
end;
$$;

comment on function pgqueue.run_now(bigint) is
'Makes a scheduled job, or one that waits for its retry, due at once; one that runs, or is blocked, is left alone. Raises PQ001.';

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
    queue text;
begin
    if priority is null then
        perform pgqueue._refuse('priority must not be null', 'It is null.', 'The default is 0.');
    end if;
    perform pgqueue._check_priority(priority);
    update pgqueue.job as j
    set priority = reprioritize.priority
    where j.id = reprioritize.job_id
    returning j.queue into queue;
    if not found then
        perform pgqueue._not_found('job', job_id, 'Only a job that waits or runs has a priority.');
    end if;
    perform pgqueue._reopened(array[queue], array[priority]);
end;
$$;

comment on function pgqueue.reprioritize(bigint, int) is
'Gives a job another priority, -100 to 100; larger runs first. For one that runs it counts from the next attempt. Raises PQ001, 22023 (bad argument).';

create or replace function pgqueue._redrive(dead_ids bigint[])
    returns setof bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    revived bigint[];
    queues text[];
    lanes int[];
begin
    with back as (
        insert into pgqueue.job as j (
            id, run_at, enqueued_at, priority, max_attempts,
            queue, kind, unique_key, group_key, payload, headers, errors
        )
        overriding system value
        select
            d.id, moment - (count(*) over () - row_number() over (order by d.id)) * interval '1 microsecond',
            d.enqueued_at, d.priority, d.max_attempts,
            d.queue, d.kind, d.unique_key, d.group_key, d.payload, d.headers, d.errors
        from pgqueue.dead_job as d
        where d.id = any (_redrive.dead_ids)
        order by d.unique_key, d.id
        on conflict do nothing
        returning j.id, j.queue, j.priority
    )
    select array_agg(b.id order by b.id), array_agg(b.queue), array_agg(b.priority)
    into revived, queues, lanes
    from back as b;

    delete from pgqueue.dead_job as d where d.id = any (revived);
    perform pgqueue._reopened(queues, lanes);
    return query select r.id from unnest(revived) as r (id);
end;
$$;

comment on function pgqueue._redrive(bigint[]) is
'Sends locked dead jobs back to work and returns their ids; one whose unique_key is taken stays dead.';

create or replace function pgqueue._check_max_jobs(max_jobs int)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if max_jobs < 1 then
        perform pgqueue._refuse(
            'max_jobs must be at least 1', format('It is %s.', max_jobs), 'Leave it out for 1000.'
        );
    end if;
end;
$$;

comment on function pgqueue._check_max_jobs(int) is 'Raises 22023 for less than one job; null passes.';

create or replace function pgqueue._find_dead(
    queue text, kind text, error_like text, died_after timestamptz, died_before timestamptz,
    max_jobs int, is_for_work boolean
)
    returns bigint[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_indexscan = on
as $$
begin
    perform pgqueue._check_max_jobs(max_jobs);
    return array(
        select d.id
        from pgqueue.dead_job as d
        where (_find_dead.queue is null or d.queue = _find_dead.queue)
            and (_find_dead.kind is null or d.kind = _find_dead.kind)
            and (_find_dead.error_like is null or pgqueue._summary(d.error) ilike _find_dead.error_like)
            and (_find_dead.died_after is null or d.died_at >= _find_dead.died_after)
            and (_find_dead.died_before is null or d.died_at < _find_dead.died_before)
            and not (_find_dead.is_for_work and exists (
                select from pgqueue.job as j
                where j.queue = d.queue and j.unique_key = d.unique_key
                offset 0  -- by the key's index, not by a hash of all jobs
            ))
        order by d.id
        limit coalesce(_find_dead.max_jobs, 1000)
        for update of d skip locked
    );
end;
$$;

comment on function pgqueue._find_dead(text, text, text, timestamptz, timestamptz, int, boolean) is
'Locks the dead jobs that pass these filters, oldest id first, and returns their ids; for work only those whose unique_key no living job has.';

create or replace function pgqueue._tell_counts(what text, summaries text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
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

comment on function pgqueue._tell_counts(text, text[]) is
'For a dry run: tells how many there are of each error, in NOTICEs, the 20 most frequent.';

create or replace function pgqueue.redrive(
    queue text default null,
    kind text default null,
    error_like text default null,
    died_after timestamptz default null,
    died_before timestamptz default null,
    max_jobs int default 1000,
    dry_run boolean default false
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    dead_ids bigint[] := pgqueue._find_dead(
        queue, kind, error_like, died_after, died_before, max_jobs, true
    );
begin
    if dry_run then
        perform pgqueue._tell_counts('the dead jobs to redrive', array(
            select pgqueue._summary(d.error) from pgqueue.dead_job as d where d.id = any (dead_ids)
        ));
        return query select d.id from unnest(dead_ids) as d (id);
    else
        return query select pgqueue._redrive(dead_ids);
    end if;
end;
$$;

comment on function pgqueue.redrive(
    text, text, text, timestamptz, timestamptz, int, boolean
) is
'Sends dead jobs back to work, oldest id first, and returns their ids: same id, errors kept, due now, attempts counted from 0 again. Filters by queue, kind, pattern of the first line of the last error (ILIKE), and time of death (from died_after, before died_before); null does not filter. A job whose unique_key is taken by a living one stays dead. dry_run only returns the ids, and tells in NOTICEs how many there are of each error. Raises 22023 (bad argument).';

create or replace function pgqueue.discard_many(
    queue text default null,
    kind text default null,
    error_like text default null,
    died_after timestamptz default null,
    died_before timestamptz default null,
    max_jobs int default 1000,
    dry_run boolean default false
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    dead_ids bigint[] := pgqueue._find_dead(
        queue, kind, error_like, died_after, died_before, max_jobs, false
    );
begin
    if dry_run then
        perform pgqueue._tell_counts('the dead jobs to discard', array(
            select pgqueue._summary(d.error) from pgqueue.dead_job as d where d.id = any (dead_ids)
        ));
    else
        delete from pgqueue.dead_job as d where d.id = any (dead_ids);
    end if;
    return query select d.id from unnest(dead_ids) as d (id);
end;
$$;

comment on function pgqueue.discard_many(
    text, text, text, timestamptz, timestamptz, int, boolean
) is
'Drops dead jobs for good, oldest id first, and returns their ids; filters and dry_run are those of redrive. Raises 22023 (bad argument).';

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
    job_ids bigint[];
begin
    perform pgqueue._check_max_jobs(max_jobs);
    -- What is just being claimed or ended is left alone.
    job_ids := array(
        select j.id
        from pgqueue.job as j
        where (cancel_many.queue is null or j.queue = cancel_many.queue)
            and (cancel_many.kind is null or j.kind = cancel_many.kind)
            and (
                cancel_many.error_like is null
                or pgqueue._summary(j.errors -> -1 ->> 'error') ilike cancel_many.error_like
            )
            and (cancel_many.enqueued_after is null or j.enqueued_at >= cancel_many.enqueued_after)
            and (cancel_many.enqueued_before is null or j.enqueued_at < cancel_many.enqueued_before)
            and j.cancelled_at is null
        order by j.id
        limit coalesce(cancel_many.max_jobs, 1000)
        for update skip locked
    );
    if dry_run then
        perform pgqueue._tell_counts('the jobs to cancel', array(
            select pgqueue._summary(j.errors -> -1 ->> 'error')
            from pgqueue.job as j where j.id = any (job_ids)
        ));
    else
        perform pgqueue.cancel(c.id, cancel_many.reason) from unnest(job_ids) as c (id);
    end if;
    return query select c.id from unnest(job_ids) as c (id);
end;
$$;

comment on function pgqueue.cancel_many(
    text, text, text, timestamptz, timestamptz, int, boolean, text
) is
'Cancels jobs that wait or run, oldest id first, and returns their ids. Filters by queue, kind, pattern of the first line of the last error (ILIKE) and time of enqueue (from enqueued_after, before enqueued_before); null does not filter. dry_run only returns the ids, and tells in NOTICEs how many there are of each error. Raises 22023 (bad argument).';

create or replace function pgqueue.redrive_job(dead_id bigint, payload jsonb default null)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
begin
    update pgqueue.dead_job as d
    set payload = coalesce(redrive_job.payload, d.payload)
    where d.id = redrive_job.dead_id;
    if not found then
        perform pgqueue._not_found('dead job', dead_id, 'It may have been redriven or discarded.');
    end if;
    return (select r.id from pgqueue._redrive(array[dead_id]) as r (id));
end;
$$;

comment on function pgqueue.redrive_job(bigint, jsonb) is
'Sends one dead job back to work as redrive does, with another payload if one is given. Returns its id; null when its unique_key is taken by a living job, and it stays dead (with the new payload). Raises PQ001.';

create or replace function pgqueue.discard(dead_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
begin
    delete from pgqueue.dead_job as d where d.id = discard.dead_id;
    if not found then
        perform pgqueue._not_found('dead job', dead_id, 'It may have been redriven or discarded.');
    end if;
end;
$$;

comment on function pgqueue.discard(bigint) is 'Drops a dead job for good. Raises PQ001.';

create or replace function pgqueue.purge(queue text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    purged bigint;
begin
    with doomed as (
        select j.id
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(purge.queue) and j.queue = purge.queue
            and j.lease_expires_at is null
        order by j.id
        for update
    )
    delete from pgqueue.job as j using doomed where j.id = doomed.id;
    get diagnostics purged = row_count;
    return purged;
end;
$$;

comment on function pgqueue.purge(text) is
'Drops all jobs of a queue that wait, without a trace in run; what runs, and what is dead, stays. Returns how many.';

create or replace function pgqueue._set_paused(queue text, paused boolean)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    if octet_length(_set_paused.queue) not between 1 and 200 then
        perform pgqueue._refuse_name('queue', _set_paused.queue);
    end if;
    if _set_paused.queue is not null
        and not exists (select from pgqueue.queue as q where q.name = _set_paused.queue)
        and not exists (
            select from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_set_paused.queue) and j.queue = _set_paused.queue
        )
    then
        raise notice using
            message = format('there is no job in a queue "%s", and no setting of it', _set_paused.queue),
            hint = 'Is this its name? select queue from pgqueue.queues lists those that there are.';
    end if;
    if _set_paused.queue is null then
        update pgqueue.queue as q set paused = null where q.paused is not null;
    end if;
    insert into pgqueue.queue as q (name, paused)
    values (coalesce(_set_paused.queue, ''), _set_paused.paused)
    on conflict (name) do update set paused = excluded.paused;
    -- A row that says nothing is no setting.
    delete from pgqueue.queue as q
    where q.paused is not true and num_nonnulls(
            q.notify, q.max_attempts, q.keep_runs, q.max_payload_bytes, q.lease, q.retry_base, q.retry_cap
        ) = 0
        and (q.name = '' or not exists (
            select from pgqueue.queue as shared where shared.name = '' and shared.paused
        ));
end;
$$;

comment on function pgqueue._set_paused(text, boolean) is
'Pauses or resumes a queue; null means all, and overrules what was said of single ones.';

create or replace function pgqueue.pause(queue text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
begin
    perform pgqueue._set_paused(queue, true);
end;
$$;

comment on function pgqueue.pause(text) is
'Lets a queue, or all queues, take jobs in but give none out. What runs goes on. Raises 22023 (bad name).';

create or replace function pgqueue.resume(queue text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
begin
    perform pgqueue._set_paused(queue, false);
    if queue is not null then
        perform pgqueue._wake(queue);
    elsif current_setting('pgqueue.notify', true) is distinct from 'off' then
        perform pg_notify('pgqueue', '');
    end if;
end;
$$;

comment on function pgqueue.resume(text) is 'Undoes pause, for a queue or for all queues. Raises 22023 (bad name).';

create or replace function pgqueue._check_settings(
    max_attempts int,
    retry_base interval,
    retry_cap interval,
    keep_runs int,
    max_payload_bytes int
)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
declare
    given record;
begin
    for given in
        select *
        from (
            values
                ('max_attempts', max_attempts::text, max_attempts >= 1, 'at least 1'),
                (
                    'retry_base', retry_base::text,
                    retry_base >= '0' and retry_base <= '1 year', '0 to 1 year'
                ),
                (
                    'retry_cap', retry_cap::text,
                    retry_cap >= '0' and retry_cap <= '1 year', '0 to 1 year'
                ),
                ('keep_runs', keep_runs::text, keep_runs between 0 and 14, '0 to 14 days'),
                ('max_payload_bytes', max_payload_bytes::text, max_payload_bytes >= 1, 'at least 1')
        ) as s (name, setting, is_sane, range)
        where not s.is_sane
    loop
        perform pgqueue._refuse(
            format('%s must be %s', given.name, given.range),
            format('It is %s.', given.setting),
            'Leave a setting out to keep it as it is.'
        );
    end loop;
end;
$$;

comment on function pgqueue._check_settings(int, interval, interval, int, int) is
'Raises 22023 for an absurd setting; null passes.';

create or replace function pgqueue.configure(
    queue text,
    lease interval default null,
    max_attempts int default null,
    retry_base interval default null,
    retry_cap interval default null,
    keep_runs int default null,
    max_payload_bytes int default null,
    notify boolean default null,
    reset boolean default false
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
begin
    if octet_length(configure.queue) not between 1 and 200 then
        perform pgqueue._refuse_name('queue', configure.queue);
    end if;
    perform pgqueue._check_lease(configure.lease);
    perform pgqueue._check_settings(
        configure.max_attempts, configure.retry_base, configure.retry_cap,
        configure.keep_runs, configure.max_payload_bytes
    );

    if configure.reset then
        update pgqueue.queue as q
        set notify = null, max_attempts = null, keep_runs = null, max_payload_bytes = null,
            lease = null, retry_base = null, retry_cap = null
        where q.name = coalesce(configure.queue, '');
    end if;
    insert into pgqueue.queue as q (
        name, notify, max_attempts, keep_runs, max_payload_bytes, lease, retry_base, retry_cap
    )
    values (
        coalesce(configure.queue, ''), configure.notify, configure.max_attempts,
        configure.keep_runs, configure.max_payload_bytes, configure.lease,
        configure.retry_base, configure.retry_cap
    )
    on conflict (name) do update set
        notify = coalesce(excluded.notify, q.notify),
        max_attempts = coalesce(excluded.max_attempts, q.max_attempts),
        keep_runs = coalesce(excluded.keep_runs, q.keep_runs),
        max_payload_bytes = coalesce(excluded.max_payload_bytes, q.max_payload_bytes),
        lease = coalesce(excluded.lease, q.lease),
        retry_base = coalesce(excluded.retry_base, q.retry_base),
        retry_cap = coalesce(excluded.retry_cap, q.retry_cap);
end;
$$;

comment on function pgqueue.configure(
    text, interval, int, interval, interval, int, int, boolean, boolean
) is
'Sets what is named and leaves the rest; reset first forgets all that was set. A null queue sets it for every queue that says nothing else. lease: up to 30 days. max_attempts: from 1. retry_base, retry_cap: first and longest delay, up to 1 year. keep_runs: days in run, 0 to 14. max_payload_bytes: from 1. notify: may enqueue send NOTIFY. Raises 22023 (bad argument).';
