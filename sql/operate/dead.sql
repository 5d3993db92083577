-- Dead jobs: sent back to work, or deleted. Rows leave dead_job only here.

-- Sends locked dead jobs back to work and returns their ids; a job whose unique_key is taken stays dead.
create or replace function pgqueue._redrive(dead_ids bigint[])
    returns bigint[]
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    revived record;
begin
    with back as (
        insert into pgqueue.job as j (
            id, run_at, enqueued_at, priority, max_attempts,
            queue, kind, unique_key, group_key, terms, payload, headers, errors
        )
        overriding system value
        select
            d.id, moment - (count(*) over () - row_number() over (order by d.id)) * interval '1 microsecond',
            d.enqueued_at, d.priority, d.max_attempts,
            d.queue, d.kind, d.unique_key, d.group_key,
            case when num_nonnulls((d.terms).batch_id, (d.terms).after) > 0
                then row(null, null, (d.terms).batch_id, (d.terms).after)::pgqueue._terms
            end,
            d.payload, d.headers, d.errors
        from pgqueue.dead_job as d
        where d.id = any (_redrive.dead_ids)
        -- In the order of the keys, so that two sessions that wait for each other's keys do not deadlock.
        order by d.queue, d.unique_key, d.id
        on conflict do nothing
        returning j.id, j.queue, j.priority, j.group_key, j.run_at, (j.terms).batch_id
    )
    select
        array_agg(b.id order by b.id) as ids, array_agg(b.queue) as queues, array_agg(b.priority) as priorities,
        array_agg(b.group_key) as keys, array_agg(b.run_at) as run_ats, array_agg(b.batch_id) as batch_ids
    into revived
    from back as b;
    perform
        pgqueue._make_group_permits(u.queue, array_agg(u.group_key), pgqueue._in_force(u.queue)),
        pgqueue._make_permits_for(u.queue, (pgqueue._in_force(u.queue)).caps, null)
    from unnest(revived.queues, revived.keys) as u (queue, group_key)
    group by u.queue;
    perform pgqueue._rejoin_batches(revived.batch_ids);
    delete from pgqueue.dead_job as d where d.id = any (revived.ids);
    perform pgqueue._reopened(revived.queues, revived.priorities, revived.keys, revived.run_ats);
    return revived.ids;
end;
$$;

-- redrive and discard_many: finds the dead jobs that match these filters, lowest id first; for redrive only those
-- whose unique_key no living job has. With dry_run it only reports them.
create or replace function pgqueue._end_death(
    verb text, queue text, kind text, error_like text, died_after timestamptz, died_before timestamptz,
    max_jobs int, dry_run boolean
)
    returns bigint[]
    language plpgsql
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    ids bigint[];
    summaries text[];
begin
    select array_agg(u.id order by u.id), array_agg(u.summary) into ids, summaries
    from (
        select f.*, row_number() over (partition by f.queue, f.unique_key order by f.id) as nth
        from (
            select d.id, d.queue, d.unique_key, pgqueue._summary(d.error) as summary
            from pgqueue.dead_job as d
            where (_end_death.queue is null or d.queue = _end_death.queue)
                and (_end_death.kind is null or d.kind = _end_death.kind)
                and (
                    _end_death.error_like is null
                    or pgqueue._summary(d.error) ilike _end_death.error_like collate "default"
                )
                and (_end_death.died_after is null or d.died_at >= _end_death.died_after)
                and (_end_death.died_before is null or d.died_at < _end_death.died_before)
                and not (_end_death.verb = 'redrive' and d.unique_key is not null and exists (
                    select from pgqueue._with_key(d.queue, d.unique_key)
                    offset 0
                ))
            order by d.id
            limit coalesce(_end_death.max_jobs, 1000)
            for update of d skip locked
        ) as f
    ) as u
    -- Of those with the same key only the first comes back.
    where u.nth = 1 or u.unique_key is null or verb <> 'redrive';
    if dry_run then
        perform pgqueue._tell_counts('the dead jobs to ' || verb, summaries);
    elsif verb = 'redrive' then
        ids := pgqueue._redrive(ids);
    else
        delete from pgqueue.dead_job as d where d.id = any (ids);
        perform pgqueue._note_gone(ids);
    end if;
    return ids;
end;
$$;

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
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_ranges(max_jobs => max_jobs, error_like => error_like));
begin
    return query
    select unnest(pgqueue._end_death('redrive', queue, kind, error_like, died_after, died_before, max_jobs, dry_run));
end;
$$;

comment on function pgqueue.redrive(text, text, text, timestamptz, timestamptz, int, boolean) is
'Sends dead jobs back to work, lowest id first, and returns their ids: same id,
errors kept, due now, attempts counted from 0 again, without an expires_at. A
job of an unfinished batch belongs to it again. Filters by queue, kind,
pattern of the first line of the last error (ILIKE), and time of death (from
died_after, before died_before); null does not filter. A job whose unique_key
is taken by a living one stays dead. dry_run only returns the ids, and reports
in NOTICEs how often each error occurs.
Raises 22023 (bad argument).';

create or replace function pgqueue.redrive_job(dead_id bigint, payload jsonb default null)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    dead pgqueue.dead_job;
    refused boolean;
begin
    select d.* into dead from pgqueue.dead_job as d where d.id = redrive_job.dead_id for update;
    refused := pgqueue._refuse(case when found
        then pgqueue._check_payload(
            payload, (pgqueue._in_force(dead.queue, dead.kind, dead.group_key)).max_payload_bytes
        )
        else pgqueue._not_found('dead job', dead_id)
    end);
    if payload is not null then
        update pgqueue.dead_job as d set payload = redrive_job.payload where d.id = dead.id;
    end if;
    return (pgqueue._redrive(array[dead_id]))[1];
end;
$$;

comment on function pgqueue.redrive_job(bigint, jsonb) is
'Sends one dead job back to work as redrive does, with another payload if one
is given. Returns its id, or null if its unique_key is taken by a living job:
then it stays dead (with the new payload).
Raises PQ001 (no such dead job), 54000 (the new payload is too large).';

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
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_ranges(max_jobs => max_jobs, error_like => error_like));
begin
    return query
    select unnest(pgqueue._end_death('discard', queue, kind, error_like, died_after, died_before, max_jobs, dry_run));
end;
$$;

comment on function pgqueue.discard_many(text, text, text, timestamptz, timestamptz, int, boolean) is
'Deletes dead jobs for good, lowest id first, and returns their ids; filters and
dry_run are those of redrive.
Raises 22023 (bad argument).';

create or replace function pgqueue.discard(dead_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    refused boolean;
begin
    delete from pgqueue.dead_job as d where d.id = discard.dead_id;
    refused := pgqueue._refuse(case when not found then pgqueue._not_found('dead job', dead_id) end);
    perform pgqueue._note_gone(array[dead_id]);
end;
$$;

comment on function pgqueue.discard(bigint) is
'Deletes a dead job for good.
Raises PQ001 (no such dead job).';

-- keep_dead. The kinds of each queue, and of each group with a setting of its own, are looked up one by
-- one in an index, and only dead jobs whose time is over are read. So jobs that are kept cost nothing, except
-- those of a group that keeps them longer than their kind does.
-- This returns each kind of each queue that has dead jobs, and when the oldest of them died.
create or replace function pgqueue._dead_kinds()
    returns table (queue text, kind text, oldest timestamptz)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_sort = off
    set enable_bitmapscan = off
as $$
begin
    return query
    with recursive step (queue, kind, oldest) as (
        values ('', '', null::timestamptz)
        union all
        select n.*
        from step as s
        cross join lateral (
            select d.queue, d.kind, d.died_at
            from pgqueue.dead_job as d
            where (d.queue, d.kind) > (s.queue, s.kind)
            order by d.queue, d.kind, d.died_at
            limit 1
        ) as n
    )
    select s.* from step as s where s.oldest is not null;
end;
$$;

-- Deletes at most 10,000 dead jobs that have been kept for keep_dead, for each kind the oldest first;
-- returns how many. Locked ones are left for the next call.
create or replace function pgqueue._forget_dead()
    returns bigint
    language plpgsql
    set enable_sort = off
    set enable_bitmapscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    latest timestamptz := (select max(moment - q.keep_dead) from pgqueue.queue as q where q.keep_dead is not null);
    dropped bigint[] := '{}'::bigint[];
    picks tid[];
    given record;
begin
    if latest is null then
        return 0;
    end if;
    for given in
        -- As in _dead_kinds, for groups that have a keep_dead of their own.
        with recursive step (queue, kind, oldest, group_key) as (
            select distinct '', '', null::timestamptz, q.group_key
            from pgqueue.queue as q
            where q.keep_dead is not null and q.group_key <> ''
            union all
            select n.*
            from step as s
            cross join lateral (
                select d.queue, d.kind, d.died_at, d.group_key
                from pgqueue.dead_job as d
                where d.group_key = s.group_key and (d.queue, d.kind) > (s.queue, s.kind)
                order by d.queue, d.kind, d.died_at
                limit 1
            ) as n
        )
        select u.*, moment - (pgqueue._in_force(u.queue, u.kind, u.group_key)).keep_dead as died_by
        from (
            select k.*, null as group_key from pgqueue._dead_kinds() as k
            union all
            select s.* from step as s where s.oldest is not null
        ) as u
        -- Settings are read only where some job's time may be over.
        where u.oldest <= latest
        order by u.oldest
    loop
        picks := case when given.group_key is null
            then array(
                select d.ctid
                from pgqueue.dead_job as d
                where d.queue = given.queue and d.kind = given.kind and d.died_at <= given.died_by
                    -- Jobs of a group with its own setting do not go by that of their kind.
                    and not exists (
                        select from pgqueue.queue as q
                        where q.group_key = d.group_key and q.keep_dead is not null
                        offset 0
                    )
                order by d.died_at
                limit 10000 - cardinality(dropped)
                for update skip locked
            )
            else array(
                select d.ctid
                from pgqueue.dead_job as d
                where d.group_key = given.group_key and d.queue = given.queue and d.kind = given.kind
                    and d.died_at <= given.died_by
                order by d.died_at
                limit 10000 - cardinality(dropped)
                for update skip locked
            )
        end;
        with deleted as (
            delete from pgqueue.dead_job as d where d.ctid = any (picks) returning d.id
        )
        select dropped || array_agg(d.id) into dropped from deleted as d;
        exit when cardinality(dropped) = 10000;
    end loop;
    perform pgqueue._note_gone(dropped);
    return cardinality(dropped);
end;
$$;
