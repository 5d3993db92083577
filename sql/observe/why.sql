-- Why a job is not running. To add a reason, add a line to the function for the state the job is in. All of these
-- functions only read, and lock nothing.

-- A moment as text for a sentence: in the time zone of the session, whatever its DateStyle.
create or replace function pgqueue._written(moment timestamptz)
    returns text
    language plpgsql
    stable
as $$
begin
    return to_char(moment, 'YYYY-MM-DD HH24:MI:SSOF');
end;
$$;

-- Which pause keeps a job from running: of the pair of its kind and group, or else of its group, its kind or its queue.
-- The narrowest that says anything decides, as in _is_wanted, so it is also the one to resume. Null for nothing.
create or replace function pgqueue._why_paused(job pgqueue.job)
    returns text
    language plpgsql
    stable
as $$
begin
    return (
        select case
            when not q.paused then null
            when q.kind <> '' and q.group_key <> '' then 'its kind and group are paused together'
            when q.group_key <> '' then 'its group is paused'
            when q.kind <> '' then 'its kind is paused'
            else 'its queue is paused'
        end
        from pgqueue.queue as q
        where q.name in ('', job.queue) and q.kind in ('', job.kind) and q.group_key in ('', job.group_key)
            and q.paused is not null
        order by q.group_key <> '' desc, q.kind <> '' desc, q.name <> '' desc
        limit 1
    );
end;
$$;

-- Which caps are full for a job, those of its group first: how many jobs hold their permits, until when (the first of
-- them), one of these, and one whose lease has expired.
create or replace function pgqueue._full_caps(job pgqueue.job, moment timestamptz)
    returns table (cap pgqueue._cap, jobs bigint, free_at timestamptz, holder bigint, lost bigint)
    language plpgsql
as $$
declare
    keys text[] := array_remove(array[job.group_key], null);
    settings record := pgqueue._group_settings(job.queue, keys, pgqueue._in_force(job.queue));
    caps pgqueue._cap[] := (pgqueue._group_caps(keys, settings.limits, settings.rates, settings.periods, null)).caps
        || pgqueue._caps_of((pgqueue._in_force(job.queue)).caps, array[job.kind]);
begin
    foreach cap in array caps loop
        -- A retry that has kept its permit has what the limit asks for.
        continue when cap.group_key <> '' and not cap.is_rate and pgqueue._keeps_permit(job, cap.most, moment);
        select
            count(*), min(p.free_at),
            -- After a limit was lowered, a retry cannot begin with a permit beyond it.
            (array_agg(p.holder order by p.place > cap.most, p.holder))[1],
            (array_agg(p.holder order by p.free_at) filter (where p.free_at <= moment))[1]
        into jobs, free_at, holder, lost
        from pgqueue._permits(job.queue, cap, moment) as p
        where case
            -- After a rate was lowered, those beyond it are of no use.
            when cap.is_rate then p.is_held and p.place <= cap.most
            else p.is_held or p.holder <> job.id
        end;
        if jobs >= cap.most then
            return next;
        end if;
    end loop;
end;
$$;

-- For a full group: what one of the jobs that hold its permits does, how many more there are, and what keeps that job
-- from beginning or ending if it should.
create or replace function pgqueue._why_busy(holder pgqueue.job, most int, more bigint, moment timestamptz)
    returns text
    language plpgsql
as $$
begin
    return concat(
        case
            when holder.lease_expires_at <= moment then format(
                'is busy with job %s, whose lease expired at %s', holder.id, pgqueue._written(holder.lease_expires_at)
            )
            when holder.lease_expires_at is not null then format(
                'is busy with job %s, leased to %s until %s', holder.id, holder.worker,
                pgqueue._written(holder.lease_expires_at)
            )
            when holder.run_at <= moment
                then format('waits for the retry of job %s, due since %s', holder.id, pgqueue._written(holder.run_at))
            else format('waits for the retry of job %s at %s', holder.id, pgqueue._written(holder.run_at))
        end,
        ', and ' || nullif(more, 0) || ' more',
        ': ' || case
            when holder.lease_expires_at <= moment
                then coalesce(pgqueue._why_locked(holder.id), 'a claim or maintain() ends it')
            -- It begins with its permit, so nothing here leads back to this group's limit.
            when pgqueue._keeps_permit(holder, most, moment) then coalesce(
                pgqueue._why_paused(holder), pgqueue._why_capped(holder, moment), pgqueue._why_locked(holder.id),
                substring(pgqueue._why_unclaimed(holder, moment) from '.* its kind.*')
            )
        end
    );
end;
$$;

-- Which limit of its group, or cap of its queue, kind or group a job waits for, if any; and which jobs keep its group
-- busy.
create or replace function pgqueue._why_capped(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
as $$
declare
    f record;
    cap pgqueue._cap;
    whose text;
begin
    select c.* into f from pgqueue._full_caps(job, moment) as c limit 1;
    if not found then
        return null;
    end if;
    cap := f.cap;
    whose := case
        when cap.group_key <> '' then 'its group ' || cap.group_key
        when cap.kind <> '' then 'its kind ' || cap.kind
        else 'its queue'
    end;
    return case
        when cap.is_rate then format(
            'rate limited until %s: %s begins at most %s in %s', pgqueue._written(f.free_at), whose,
            case cap.most when 1 then '1 job' else cap.most || ' jobs' end, cap.period
        )
        when cap.group_key <> '' then (
            select whose || ' ' || pgqueue._why_busy(h, cap.most, f.jobs - 1, moment)
            from pgqueue.job as h
            where h.id = coalesce(f.lost, f.holder)
        )
        else concat(
            format('%s runs as many jobs as it may, %s', whose, cap.most),
            case when f.lost is not null then
                format(', but a lease expired at %s', pgqueue._written(f.free_at)) || coalesce(
                    format(', that of job %s: ', f.lost) || pgqueue._why_locked(f.lost),
                    ': a claim or maintain() ends it'
                )
            end
        )
    end;
end;
$$;

-- Which other sessions hold or await locks on tables and rows in this database, and how to end them. A row is locked
-- by the transaction whose id is its xmax. bars_writers: whether a table lock in this mode keeps others from writing.
create or replace function pgqueue._lock_holders()
    returns table (
        what text, relation oid, xid xid, mode text, is_held boolean, pid int, since timestamptz,
        waits_since timestamptz, holder text, hint text, bars_writers boolean
    )
    language plpgsql
as $$
begin
    return query
    select
        l.locktype, l.relation, l.transactionid, l.mode, l.granted, l.pid, coalesce(a.xact_start, p.prepared),
        l.waitstart,
        case when p.gid is null
            then concat(
                'session ', l.pid, case when l.granted then ' has used it' else ' has waited for it' end,
                ' since ' || pgqueue._written(a.xact_start),
                ' (' || nullif(concat_ws(', ', a.usename, nullif(a.application_name, ''), a.state), '') || ')'
            )
            else format('prepared transaction %s has used it', p.gid)
        end,
        case when p.gid is null
            then format('select pg_terminate_backend(%s)', l.pid) else format('rollback prepared %L', p.gid)
        end,
        l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
    from pg_locks as l
    left join pg_stat_activity as a on a.pid = l.pid
    -- Only the lock on its own id tells which prepared transaction it is.
    left join (
        pg_locks as own
        join pg_prepared_xacts as p on p.transaction = own.transactionid
    ) on own.virtualtransaction = l.virtualtransaction and l.pid is null and own.pid is null
    where (
            l.database = (select d.oid from pg_database as d where d.datname = current_database())
            or l.locktype = 'transactionid'
        )
        and l.pid is distinct from pg_backend_pid();
end;
$$;

-- Which session, if any, has locked the row of a job, or the table, so that no claim can take or recover it.
create or replace function pgqueue._why_locked(job_id bigint)
    returns text
    language plpgsql
as $$
begin
    return (
        select format('its %s is locked: %s', case l.what when 'relation' then 'table' else 'row' end, l.holder)
        from pgqueue.job as j
        join pgqueue._lock_holders() as l on l.xid = j.xmax and l.what = 'transactionid'
            or l.relation = 'pgqueue.job'::regclass and l.what = 'relation' and l.bars_writers
        where j.id = _why_locked.job_id and l.is_held
        order by l.since
        limit 1
    );
end;
$$;

-- How many ready jobs are ahead of this one, and how many of these are paused; it looks no further than 10,001. Of its
-- own priority only those of its group count or, if it has none, those without one: the groups, and the jobs without
-- one, are served in turn.
create or replace function pgqueue._ahead(job pgqueue.job, moment timestamptz, out jobs bigint, out paused bigint)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_sort = off
as $$
declare
    settings pgqueue.queue_in_force := pgqueue._in_force(job.queue);
    age_after interval := settings.age_after;
    pauses jsonb := case when settings.has_pauses then pgqueue._paused(job.queue, settings.paused) end;
begin
    select count(*), count(*) filter (where not pgqueue._is_wanted(a.kind, a.group_key, null, pauses))
    into jobs, paused
    from (
        select ahead.kind, ahead.group_key
        from (
            select v.lane, v.lane - case when v.lane > 500 then 1000 else 0 end as priority
            from pgqueue._live_lanes(job.queue) as v
        ) as l
        cross join lateral pgqueue._due_by(l.priority, job.priority, job.run_at, moment, age_after) as b (due_by)
        cross join lateral (
            select j.kind, j.group_key
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, job.queue, l.lane)
                and (j.run_at, j.id) < (b.due_by, 9223372036854775807) and j.lease_expires_at is null
            order by j.run_at, j.id
            limit 10001
        ) as ahead
        where l.priority > job.priority or l.priority <> job.priority and age_after is not null
        union all
        (
            select j.kind, j.group_key
            from pgqueue.job as j
            where job.group_key is null and pgqueue._is_in_lane(j, job.queue, job.priority)
                and (j.run_at, j.id) < (job.run_at, job.id) and j.lease_expires_at is null
            order by j.run_at, j.id
            limit 10001
        )
        union all
        (
            select j.kind, j.group_key
            from pgqueue.job as j
            where pgqueue._is_in_group(j, job.queue, job.group_key) and -j.priority = -job.priority
                and (j.run_at, j.id) < (job.run_at, job.id) and j.lease_expires_at is null
            order by j.run_at, j.id
            limit 10001
        )
        limit 10001
    ) as a;
end;
$$;

-- Which kinds of which queues live sessions have said that they serve; null kinds: all. A standby does not know
-- which sessions are alive.
create or replace function pgqueue._served()
    returns table (queue text, kinds text[])
    language plpgsql
as $$
begin
    return query
    select s.queue, case when bool_and(s.kinds is not null) then array_agg(distinct k.kind) end
    from pgqueue.service as s
    left join pg_stat_activity as a on a.pid = s.pid and (a.backend_start = s.started) is not false
    left join lateral unnest(s.kinds) as k (kind) on true
    where s.until > clock_timestamp() and (a.pid is not null or pg_is_in_recovery())
    group by s.queue;
end;
$$;

-- Whether a worker has claimed from a queue, or a kind of it, since then, judging by the running jobs and the log. Of
-- the whole log it looks at 100,000 runs: if there are more, a worker may have.
create or replace function pgqueue._is_claimed(queue text, kind text, since timestamptz)
    returns boolean
    language plpgsql
    set enable_sort = off
    set enable_bitmapscan = on
as $$
declare
    most int := case when since = '-infinity' then 100000 end;
begin
    return exists (
        select
        from pgqueue._live_lanes(queue) as l
        cross join lateral (
            -- Running jobs stay at their places, near the beginning.
            select j.claimed_at, j.kind
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, _is_claimed.queue, l.lane)
            order by j.run_at, j.id
            limit 1000
        ) as f
        where f.claimed_at > since and f.kind = coalesce(_is_claimed.kind, f.kind)
    ) or exists (
        select
        from (select r.queue, r.kind, r.worker from pgqueue.run as r where r.finished_at > since limit most) as r
        where r.queue = _is_claimed.queue and r.worker is not null and r.kind = coalesce(_is_claimed.kind, r.kind)
    ) or exists (select from pgqueue.run as r where most > 0 offset most - 1);
end;
$$;

-- Says that no worker takes the kind of a ready job, or anything from its queue; null if one does, or has put it
-- off, and without a log.
create or replace function pgqueue._why_unclaimed(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
as $$
declare
    lately timestamptz := moment - interval '10 minutes';
    kind text;
begin
    if (pgqueue._in_force(job.queue)).keep_runs = 0 or (pgqueue._put_off(job) ->> 'at')::timestamptz > lately
        or pgqueue._is_claimed(job.queue, job.kind, lately)
    then
        return null;
    elsif exists (select from pgqueue._served() as s where s.queue = job.queue and job.kind <> all (s.kinds)) then
        return 'no worker takes its kind: the workers of its queue take others';
    elsif pgqueue._is_claimed(job.queue, null, lately) then
        if job.run_at >= lately then
            return null;
        end if;
        kind := job.kind;
    end if;
    return format(
        'no worker has claimed %s%s', case when kind is null then 'from it' else 'its kind' end,
        case when pgqueue._is_claimed(job.queue, kind, '-infinity')
            then ' for 10 minutes' else ', as far as the log remembers'
        end
    );
end;
$$;

-- If the group of a job has a limit, what holds up the group's first job, which it must not overtake; null for
-- nothing. One of a higher priority is only waited for under a limit of 1. A retry that has kept its permit overtakes
-- all.
create or replace function pgqueue._why_behind(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
as $$
declare
    most int := (pgqueue._in_force(job.queue, '', job.group_key)).group_limit;
    head pgqueue.job;
begin
    if job.group_key is null or job.permits is not null or most is null then
        return null;
    end if;
    select f.* into head
    from (
        select j.*
        from pgqueue.job as j
        where pgqueue._is_in_group(j, job.queue, job.group_key)
            and (-j.priority, j.run_at, j.id) < (-job.priority, job.run_at, job.id) and j.run_at <= moment
            and (most = 1 or j.priority = job.priority)
        order by -j.priority, j.run_at, j.id
        limit 10000
    ) as f
    where f.lease_expires_at is null and ((f.terms).expires_at <= moment) is not true
    limit 1;
    return case when head.id is not null then
        format('its group %s waits for job %s, which comes first: ', job.group_key, head.id) || coalesce(
            pgqueue._why_paused(head), pgqueue._why_capped(head, moment),
            substring(pgqueue._why_unclaimed(head, moment) from '.* its kind.*')
        )
    end;
end;
$$;

-- Whether claims pass over a job that has expired, so that only maintain() ends it. They find a lost lease by its
-- place, or by its permit of a limit or cap, but not where a rate is used up.
create or replace function pgqueue._is_passed_over(job pgqueue.job, moment timestamptz)
    returns boolean
    language plpgsql
as $$
begin
    -- It begins no more, so a permit that it has kept does not put it before others.
    job.permits := null;
    return pgqueue._why_paused(job) is not null or case
        when job.lease_expires_at is null
            then num_nonnulls(pgqueue._why_capped(job, moment), pgqueue._why_behind(job, moment)) > 0
        else exists (select from pgqueue._full_caps(job, moment) as f where (f.cap).is_rate)
    end;
end;
$$;

-- What a suspended job waits for, and since when; null if it is not suspended, or is due.
create or replace function pgqueue._why_suspended(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
as $$
declare
    wait pgqueue.wait;
begin
    select w.* into wait from pgqueue.wait as w where w.job_id = job.id;
    return case when job.run_at > moment and wait.since is not null then format(
        'suspended since %s: %s', pgqueue._written(wait.since),
        case when exists (select from pgqueue.event as e where e.name = wait.event)
            then format('event "%s" has happened, and the next claim or maintain will see it', wait.event)
            else concat('waits ', concat_ws(
                ' or ',
                'for event "' || wait.event || '"',
                (
                    select concat('for job ', min(d.job_id), ' and ' || nullif(count(*) - 1, 0) || ' more')
                    from pgqueue.dependency as d
                    where d.waiter_id = job.id
                    having count(*) > 0
                ),
                case when job.run_at < 'infinity' then 'until ' || pgqueue._written(job.run_at) end
            ))
        end
    ) end;
end;
$$;

-- The last step that a job has saved; null for none.
create or replace function pgqueue._last_step(job_id bigint)
    returns text
    language plpgsql
as $$
begin
    return (
        select format('its last step: %s, at %s', s.name, pgqueue._written(s.saved_at))
        from pgqueue.step as s
        where s.job_id = _last_step.job_id
        order by s.place desc, s.saved_at desc
        limit 1
    );
end;
$$;

-- why for a job that no worker holds, with the time until which it may begin.
create or replace function pgqueue._why_waits(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
as $$
declare
    expires_at timestamptz := (job.terms).expires_at;
    begun text := case when job.attempt > 0 then 'begun again' else 'begun' end;
    suspended text := pgqueue._why_suspended(job, moment);
begin
    if expires_at <= moment then
        return format(
            'expired at %s, not %s by then: the next %s cancels it', pgqueue._written(expires_at), begun,
            case
                when job.run_at > moment or pgqueue._is_passed_over(job, moment) then 'maintain()'
                else 'claim or maintain()'
            end
        );
    end if;
    return concat_ws('; ',
        case
            when suspended is not null then suspended
            when job.run_at = 'infinity' then (
                select case
                    when count(*) = 0 then 'blocked: its wait is over, and the next claim or maintain will see it'
                    else concat('blocked: waits for job ', min(d.job_id), ' and ' || nullif(count(*) - 1, 0) || ' more')
                end
                from pgqueue.dependency as d
                where d.waiter_id = job.id and exists (select from pgqueue.job as j where j.id = d.job_id offset 0)
            )
            when job.run_at <= moment then coalesce(
                pgqueue._why_paused(job), pgqueue._why_capped(job, moment), pgqueue._why_locked(job.id),
                pgqueue._why_behind(job, moment),
                (
                    select case
                        when a.jobs > 10000 then concat(
                            'ready: waits behind more than 10,000 jobs of higher priority or earlier turn in its queue',
                            case when a.paused > 0 then ', some of them paused' end
                        )
                        when a.jobs = a.paused then 'ready: next in its queue'
                        else format(
                            'ready: waits behind %s %s of higher priority or earlier turn in its queue',
                            to_char(a.jobs - a.paused, 'FM999,999,999'),
                            case when a.jobs - a.paused = 1 then 'job' else 'jobs' end
                        )
                    end || case
                        when not exists (
                            select
                            from (
                                select t.group_key, t.is_blocked
                                from pgqueue.ticket as t
                                where pgqueue._is_ticket_in(t, job.queue, job.priority) and t.at <= moment
                                limit 1000
                            ) as t
                            where t.group_key is distinct from job.group_key and not t.is_blocked
                        ) then ''
                        when job.group_key is null then ', in turn with groups'
                        else ', in turn with other groups'
                    end || coalesce('; ' || pgqueue._why_unclaimed(job, moment), '')
                    from pgqueue._ahead(job, moment) as a
                )
            )
            when (job.errors -> -1 ->> 'attempt')::int = job.attempt then format(
                'waits for its retry at %s after attempt %s of %s: %s',
                pgqueue._written(job.run_at), job.attempt, job.max_attempts,
                pgqueue._summary(job.errors -> -1 ->> 'error')
            )
            else 'scheduled for ' || pgqueue._written(job.run_at)
        end,
        case when job.run_at > moment then pgqueue._why_paused(job) end,
        'put off by ' || (pgqueue._put_off(job) ->> 'worker') || ': '
            || pgqueue._summary(pgqueue._put_off(job) ->> 'error'),
        'expires at ' || pgqueue._written(expires_at) || format(' if it is not %s by then', begun),
        pgqueue._last_step(job.id)
    );
end;
$$;

create or replace function pgqueue.why(job_id bigint)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
    set enable_nestloop = on
as $$
declare
    moment timestamptz := clock_timestamp();
    present record;
    job pgqueue.job;
    last pgqueue.run;
    refused boolean;
begin
    -- In one statement, because the job may be moving from one table to the other.
    select j as job, d as dead into present
    from (values (why.job_id)) as asked (id)
    left join pgqueue.job as j on j.id = asked.id
    left join pgqueue.dead_job as d on d.id = asked.id;
    job := present.job;
    if job.lease_expires_at <= moment then
        return concat_ws('; ', pgqueue._why_locked(job.id), format(
            'its lease expired at %s: the next %s %s (worker %s)',
            pgqueue._written(job.lease_expires_at),
            case when pgqueue._is_passed_over(job, moment) then 'maintain()' else 'claim' end,
            case
                when job.cancelled_at is not null then 'cancels it'
                when job.attempt >= job.max_attempts then 'moves it to dead_job'
                else 'recovers it'
            end,
            job.worker
        ));
    elsif job.lease_expires_at is not null then
        return case when job.cancelled_at is not null
            then format(
                'its worker %s was asked to stop at %s: cancelling', job.worker, pgqueue._written(job.cancelled_at)
            )
            else concat_ws('; ', format(
                'runs: attempt %s of %s, leased to %s until %s',
                job.attempt, job.max_attempts, job.worker, pgqueue._written(job.lease_expires_at)
            ), pgqueue._last_step(job.id))
        end;
    elsif job.id is not null then
        return pgqueue._why_waits(job, moment);
    elsif (present.dead).id is not null then
        return format(
            'dead since %s: %s; redrive_job(%s) sends it back',
            pgqueue._written((present.dead).died_at), pgqueue._summary((present.dead).error), job_id
        );
    end if;

    last := pgqueue._last_run(job_id);
    refused := pgqueue._refuse(case when last.job_id is null then pgqueue._not_found('job', job_id) end);
    return case last.outcome
        when 'completed' then format('completed at %s on attempt %s', pgqueue._written(last.finished_at), last.attempt)
        when 'cancelled' then concat_ws(
            ': ', 'cancelled at ' || pgqueue._written(last.finished_at), pgqueue._summary(last.result #>> '{}')
        )
        -- It was discarded or purged, which leaves no row in run.
        else format(
            'gone; its attempt %s failed at %s: %s', last.attempt, pgqueue._written(last.finished_at), last.error
        )
    end;
end;
$$;

comment on function pgqueue.why(bigint) is
'Says in one sentence why a job is not running, or what happened to it. Only
reads; for a job that has ended it looks through run.
Raises PQ001 (no such job).';
