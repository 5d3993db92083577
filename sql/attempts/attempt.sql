-- How attempts end that did not complete: how long to wait, what is kept of the error, and
-- where the job goes. Only this module moves a job to dead_job or sends it back. Its callers have
-- locked the jobs. What follows any end, including completion, is in _after_end.

-- How long to wait after a failed attempt: least(cap, base * 2^(attempt - 1)) times a random 0.5 to 1.
create or replace function pgqueue._retry_delay(attempt int, retry_base interval, retry_cap interval)
    returns interval
    language plpgsql
as $$
begin
    -- The exponent is capped first, or high attempts would overflow. Between half and all of the
    -- delay, at random: jobs that failed together must not come back together.
    return make_interval(secs => (0.5 + random() / 2) * least(
        extract(epoch from retry_cap)::float8,
        extract(epoch from retry_base)::float8 * power(2::float8, least(attempt - 1, 60))
    ));
end;
$$;

-- The first line of an error, used to find, count and log it.
create or replace function pgqueue._summary(error text)
    returns text
    language sql
    immutable
as $$
    select left(split_part(ltrim(error collate "default", E' \t\r\n'), E'\n', 1), 500)
$$;

-- Why a job was last put off (released with a reason): an error without an attempt; null if it was not.
create or replace function pgqueue._put_off(job pgqueue.job)
    returns jsonb
    language sql
    immutable
as $$
    select case when jsonb_typeof((job).errors -> -1 -> 'attempt') = 'null' then (job).errors -> -1 end
$$;

-- A job's errors with a new one added (null for none): the last 10, without the reason for which it was put off
-- before.
create or replace function pgqueue._add_error(
    job pgqueue.job, error text, moment timestamptz, is_counted boolean default true
)
    returns jsonb
    language plpgsql
    immutable
as $$
declare
    errors jsonb := case when pgqueue._put_off(job) is null then job.errors else job.errors - -1 end;
begin
    return case
        when error is null then errors
        else case when jsonb_array_length(errors) >= 10 then errors - 0 else errors end
            || jsonb_build_array(jsonb_build_object(
                'attempt', case when is_counted then job.attempt end,
                'at', moment, 'worker', job.worker, 'error', error
            ))
    end;
end;
$$;

-- Writes the current attempts of some locked jobs into run.
create or replace function pgqueue._log(
    picks tid[], outcomes text[], errors text[], moment timestamptz, results jsonb[] default null
)
    returns void
    language plpgsql
as $$
declare
    today int := floor(date_part('epoch', moment) / 86400)::int;
begin
    insert into pgqueue.run (
        slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker, result, error, payload,
        headers, options
    )
    select
        (today + settings.keep_runs) % 16,
        j.attempt, j.id, _log.moment,
        coalesce(j.claimed_at, _log.moment) - least(j.run_at, j.claimed_at, _log.moment),
        _log.moment - coalesce(j.claimed_at, _log.moment),
        j.queue, j.kind, e.outcome, j.worker,
        case when e.outcome = 'cancelled' then to_jsonb(coalesce(j.cancel_reason, e.error)) else e.result end,
        case when e.outcome <> 'cancelled' then pgqueue._summary(e.error) end,
        kept.payload, kept.headers,
        case when (j.terms).batch_id is null then kept.options
            else coalesce(kept.options, '{}') || jsonb_build_object('batch_id', (j.terms).batch_id)
        end
    from unnest(picks, outcomes, errors, results) as e (place, outcome, error, result)
    join pgqueue.job as j on j.ctid = e.place
    cross join lateral pgqueue._in_force(j.queue, j.kind, j.group_key) as settings
    -- Not for other outcomes: a dead job is kept in dead_job, and the rest are still in job.
    left join lateral (
        select j.payload, j.headers, jsonb_build_object(
            'priority', j.priority, 'max_attempts', j.max_attempts, 'group_key', j.group_key
        ) as options
    ) as kept on settings.keep_payloads and e.outcome in ('completed', 'cancelled')
    where settings.keep_runs > 0 and e.outcome <> 'released';
end;
$$;

-- If keep_payloads is set anywhere, locks jobs that are about to complete and writes them into run. Otherwise
-- leaves that to the caller, which is faster.
create or replace function pgqueue._log_kept(job_ids bigint[], tokens bigint[], results jsonb[], moment timestamptz)
    returns boolean
    language plpgsql
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    held tid[];
begin
    if not exists (
        select from pgqueue.queue as q
        where num_nonnulls(q.keep_runs, q.keep_payloads) > 0 and q.keep_payloads
    ) then
        return false;
    end if;
    -- In a statement of its own, so that the next one sees changes for which this one waited.
    held := pgqueue._lock_held(job_ids, tokens);
    perform pgqueue._log(array_agg(h.place), array_agg('completed'::text), null, moment, array_agg(given.result))
    from unnest(held) as h (place)
    cross join lateral (select j.id, j.token from pgqueue.job as j where j.ctid = h.place offset 0) as j
    left join (
        select distinct on (u.id, u.token) u.*
        from unnest(job_ids, tokens, results) as u (id, token, result)
    ) as given on given.id = j.id and given.token = j.token;
    return true;
end;
$$;

-- For jobs whose attempts end: returns their permits, unless another session has them locked, or a job (keeping)
-- keeps that of its group for its retry. Also makes claims look again at queues and groups that may have been
-- full. These are given only for jobs that do not go back: _reopened announces the others. Relies on the planner
-- settings of its callers.
create or replace function pgqueue._return_permits(
    permits tid[], job_ids bigint[], queues text[], group_keys text[], keeping bigint[] default null
)
    returns void
    language plpgsql
as $$
declare
    are_of_groups boolean;
begin
    if coalesce(current_setting('pgqueue.lose_hints', true), '') <> '' and pgqueue._is_lost() then
        null;
    elsif cardinality(permits) = 1 and keeping is null then
        -- The usual case in one statement, which costs half as much.
        update pgqueue.permit as p
        set free_at = clock_timestamp(), job_id = null, is_surplus = false
        where p.ctid = any (array(
            select k.ctid from pgqueue.permit as k
            where k.ctid = any (_return_permits.permits) and k.job_id = any (job_ids) and not k.is_rate
            for update skip locked
        ))
        returning p.group_key <> '' into are_of_groups;
    else
        with back as (
            update pgqueue.permit as p
            set free_at = clock_timestamp(), job_id = null, is_surplus = false
            where p.ctid = any (array(
                select k.ctid from pgqueue.permit as k
                where k.ctid = any (_return_permits.permits) and k.job_id = any (job_ids) and not k.is_rate
                    and (keeping is null or k.group_key = '' or k.job_id <> all (keeping))
                for update skip locked
            ))
            returning p.group_key
        )
        select bool_and(b.group_key <> '') into are_of_groups from back as b;
    end if;
    if num_nonnulls(variadic group_keys) > 0 then
        perform pgqueue._wake_groups(queues, group_keys);
    end if;
    if are_of_groups is not true and cardinality(queues) = 1 then
        perform pgqueue._wake(queues[1]);
    elsif are_of_groups is not true then
        perform pgqueue._wake(u.name) from unnest(queues) as u (name) group by u.name;
    end if;
end;
$$;

-- Whether anything depends on the end of a job: other jobs that wait for it, steps, or a wait of its own.
create or replace function pgqueue._is_followed(job_id bigint)
    returns boolean
    language plpgsql
as $$
begin
    perform from pgqueue.dependency as d where d.job_id = _is_followed.job_id
    union all
    select from pgqueue.step as s where s.job_id = _is_followed.job_id
    union all
    select from pgqueue.wait as w where w.job_id = _is_followed.job_id
    limit 1;
    return found;
end;
$$;

-- Deletes the ties of jobs that no longer wait for anything. Locked ties are being cut by another session; if that
-- is rolled back they are left over, and the next suspend of their job deletes them.
create or replace function pgqueue._drop_ties(waiter_ids bigint[])
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
as $$
begin
    delete from pgqueue.dependency as d
    where d.ctid = any (array(
        select t.ctid from pgqueue.dependency as t where t.waiter_id = any (waiter_ids) for update skip locked
    ));
end;
$$;

-- Deletes the waits of jobs, if they were suspended, and their ties.
create or replace function pgqueue._end_waits(job_ids bigint[])
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
as $$
declare
    ended bigint[];
begin
    if pg_relation_size('pgqueue.wait') = 0 then
        return;
    end if;
    with over as (
        delete from pgqueue.wait as w where w.job_id = any (job_ids) returning w.job_id
    )
    select array_agg(o.job_id) into ended from over as o;
    if ended is not null then
        perform pgqueue._drop_ties(ended);
    end if;
end;
$$;

-- Deletes the steps of jobs that are gone for good.
create or replace function pgqueue._forget_steps(job_ids bigint[])
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
as $$
begin
    if pg_relation_size('pgqueue.step') > 0 then
        delete from pgqueue.step as s where s.job_id = any (job_ids);
    end if;
end;
$$;

-- For each id, its part in the table gone and its place in that, a bit. Ids that one shard gives out one after the
-- other share a part. Ids from before there were shards, and all ids without shards, share parts as plain numbers.
create or replace function pgqueue._parts(ids bigint[])
    returns table (id bigint, part bigint, place int)
    language plpgsql
    stable
as $$
declare
    shard pgqueue.shard;
begin
    select s.* into shard from pgqueue.shard as s;
    return query
    select
        u.id,
        case when u.id > shard.above then -1 - ((u.id / shard.of >> 6) * shard.of + u.id % shard.of) else u.id >> 6 end,
        (case when u.id > shard.above then u.id / shard.of else u.id end & 63)::int
    from unnest(ids) as u (id);
end;
$$;

-- Records that jobs which this transaction has just deleted did not complete. Otherwise jobs
-- enqueued after them would run. Deletes their steps, too.
create or replace function pgqueue._note_gone(job_ids bigint[])
    returns void
    language plpgsql
as $$
begin
    insert into pgqueue.gone (part, ids, ended_at)
    select p.part, bit_or(1::bigint << p.place), clock_timestamp()
    from pgqueue._parts(job_ids) as p
    group by p.part;
    perform pgqueue._forget_steps(job_ids);
end;
$$;

-- What follows the ends of attempts and jobs, whoever ended them, in this order: return permits; let claims find
-- jobs that go back, and the next jobs of their groups; note which were cancelled; delete the jobs' own waits, and
-- the steps of those that are gone but not dead; count them for their batches; free or cancel the jobs that wait
-- for them (not if is_in_chain: the caller cancels a whole chain); finish batches that are over; and notify
-- sessions that wait for them. Only this function does any of this, except for what complete and complete_many
-- inline. Call it after the rows have been written. Relies on the planner settings of its callers as well.
create or replace function pgqueue._after_end(ended pgqueue._ended[], is_in_chain boolean default false)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    awaited bigint := pg_sequence_last_value('pgqueue.awaited_seq');
    has record;
begin
    select
        bool_or(e.permits is not null) as permits, bool_or(e.back_at is not null) as back,
        bool_or(e.back_at is null) as gone, bool_or(e.outcome = 'cancelled') as cancelled,
        bool_or(e.back_at is null and e.batch_id is not null) as batches,
        bool_or(e.back_at is null and e.group_key is not null and e.permits is null) as waited
    into has
    from unnest(ended) as e;
    if has.permits then
        perform pgqueue._return_permits(
            array(select u.tid from unnest(ended) as e cross join lateral unnest(e.permits) as u (tid)),
            array_agg(e.id), array_agg(e.queue) filter (where e.back_at is null),
            array_agg(e.group_key) filter (where e.back_at is null),
            array_agg(e.id) filter (where e.keeps_permit)
        )
        from unnest(ended) as e
        where e.permits is not null;
    end if;
    if has.back then
        perform pgqueue._reopened(
            array_agg(e.queue), array_agg(e.priority), array_agg(e.group_key), array_agg(e.back_at)
        )
        from unnest(ended) as e
        where e.back_at is not null;
    end if;
    if has.waited and pg_sequence_last_value('pgqueue._cell_groups_vain') > 0 then
        -- The next job of their groups may be one for other claims.
        perform pgqueue._return_turns(array_agg(e.queue), array_agg(e.group_key), '0')
        from unnest(ended) as e
        where e.back_at is null and e.group_key is not null and e.permits is null;
    end if;
    if has.waited and has.cancelled and pg_relation_size('pgqueue.permit') > 0 then
        -- With a limit, the next jobs of their groups may have waited only for these to begin.
        perform pgqueue._wake_groups(array_agg(e.queue), array_agg(e.group_key))
        from unnest(ended) as e
        where e.outcome = 'cancelled' and e.permits is null;
        perform pgqueue._wake(u.queue)
        from (select distinct e.queue from unnest(ended) as e where e.outcome = 'cancelled' and e.group_key is not null) as u;
    end if;
    if has.cancelled then
        perform pgqueue._note_gone(array(select e.id from unnest(ended) as e where e.outcome = 'cancelled'));
    end if;
    if awaited <> 0 then
        perform pgqueue._end_waits(array(select e.id from unnest(ended) as e));
        if has.gone then
            perform pgqueue._forget_steps(array(select e.id from unnest(ended) as e where e.outcome = 'completed'));
        end if;
    end if;
    -- Counted before ties are cut: if jobs that wait for these are cancelled, the batch may be over with them.
    if has.batches then
        perform pgqueue._count_ends(ended);
    end if;
    if awaited <> 0 and has.gone and not is_in_chain and pg_relation_size('pgqueue.dependency') > 0 then
        if has.cancelled then
            perform pgqueue._drop_ties(array(select e.id from unnest(ended) as e where e.outcome = 'cancelled'));
        end if;
        perform pgqueue._cut_ties(array(select e.id from unnest(ended) as e where e.back_at is null));
    end if;
    if has.batches and not pgqueue._is_lost() then
        perform pgqueue._look_at_batches(array(
            select e.batch_id from unnest(ended) as e where e.back_at is null and e.batch_id is not null
        ));
    end if;
    if pg_sequence_last_value('pgqueue._cell_awaited') > pgqueue._since_2020(clock_timestamp()) then
        perform pgqueue._tell_end(ended);
    end if;
end;
$$;

-- Ends attempts of some locked jobs that did not complete, each with its outcome: retry, expired and
-- released (whose attempt does not count) go back to work at run_at (null: to their old place), dead goes to
-- dead_job, cancelled is deleted.
create or replace function pgqueue._end(
    picks tid[], outcomes text[], errors text[], run_ats timestamptz[], moment timestamptz,
    is_in_chain boolean default false
)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    ended pgqueue._ended[] := array(
        select row(
            j.id, e.outcome, j.queue, j.group_key, (j.terms).batch_id, j.permits, j.priority,
            case when e.outcome in ('retry', 'expired', 'released') then coalesce(e.run_at, j.run_at) end,
            case when e.outcome in ('retry', 'expired') and num_nonnulls(j.permits, j.group_key) = 2
                then (pgqueue._in_force(j.queue, j.kind, j.group_key)).group_on_retry = 'block'
            end
        )::pgqueue._ended
        from unnest(picks, outcomes, run_ats) as e (place, outcome, run_at)
        join pgqueue.job as j on j.ctid = e.place
    );
begin
    if ended = '{}' then
        return;
    end if;
    perform pgqueue._log(picks, outcomes, errors, moment);

    insert into pgqueue.dead_job (
        id, died_at, enqueued_at, run_at, claimed_at, priority, attempt, max_attempts,
        queue, kind, unique_key, group_key, worker, terms, error, payload, headers, errors
    )
    select
        j.id, _end.moment, j.enqueued_at, j.run_at, j.claimed_at,
        j.priority, j.attempt, j.max_attempts, j.queue, j.kind,
        j.unique_key, j.group_key, j.worker, j.terms, e.error, j.payload,
        j.headers, pgqueue._add_error(j, e.error, _end.moment)
    from unnest(picks, outcomes, errors) as e (place, outcome, error)
    join pgqueue.job as j on j.ctid = e.place
    where e.outcome = 'dead';

    delete from pgqueue.job as j
    where j.ctid = any (array(
        select e.place
        from unnest(picks, outcomes) as e (place, outcome)
        where e.outcome in ('dead', 'cancelled')
    ));

    update pgqueue.job as j
    set run_at = coalesce(e.run_at, j.run_at),
        permits = case when j.id = any (array(select k.id from unnest(ended) as k where k.keeps_permit)) then j.permits end,
        attempt = j.attempt - (e.outcome = 'released')::int,
        token = null,
        claimed_at = null,
        lease_expires_at = null,
        worker = null,
        progress = null,
        errors = pgqueue._add_error(j, e.error, _end.moment, e.outcome <> 'released')
    from unnest(_end.picks, _end.outcomes, _end.errors, _end.run_ats) as e (place, outcome, error, run_at)
    where j.ctid = e.place and e.outcome in ('retry', 'expired', 'released');
    perform pgqueue._after_end(ended, is_in_chain);
end;
$$;

-- Ends what has expired among some locked jobs, and returns how many. Jobs whose leases expired go back to their
-- place, are dead if their attempts are used up, or are deleted if cancelled. Waiting jobs past their expires_at
-- are cancelled.
create or replace function pgqueue._expire(picks tid[], moment timestamptz)
    returns int
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    ended record;
begin
    select
        array_agg(e.place) as picks,
        array_agg(e.outcome) as outcomes,
        array_agg(case
            when e.late_since is not null
                then format('expired at %s UTC', to_char(e.late_since at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS'))
            -- A worker that held many jobs did not die because of each of them; one that held one, perhaps.
            else format(
                'the lease expired: worker %s stopped extending it (%s)',
                e.worker,
                case e.held
                    when 1 then 'its only expired lease'
                    else format('one of its %s leases that expired together', e.held)
                end
            )
        end) as errors
    into ended
    from (
        select
            j.ctid as place,
            j.worker,
            case when j.lease_expires_at is null then (j.terms).expires_at end as late_since,
            count(*) over (partition by j.worker) as held,
            case
                when j.lease_expires_at is null or j.cancelled_at is not null then 'cancelled'
                when j.attempt >= j.max_attempts then 'dead'
                else 'expired'
            end as outcome
        from pgqueue.job as j
        where j.ctid = any (_expire.picks) and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _expire.moment
    ) as e;
    perform pgqueue._end(ended.picks, ended.outcomes, ended.errors, null, moment);
    return coalesce(cardinality(ended.picks), 0);
end;
$$;

-- Ends the attempts of some locked jobs with fail, reject or release. Returns for each retry (at run_at; null:
-- after the backoff), dead, released (to run_at; null: to its old place) or cancelled.
create or replace function pgqueue._end_attempts(
    picks tid[], verbs text[], errors text[], run_ats timestamptz[], moment timestamptz
)
    returns table (job_id bigint, status text)
    language plpgsql
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    given record;
begin
    select
        array_agg(o.id) as ids,
        array_agg(o.place) as picks,
        array_agg(o.outcome) as outcomes,
        -- Recording a failure never fails: any text is kept, or its beginning.
        array_agg(coalesce(left(o.error, 8000), case when o.verb <> 'release' then 'no error text' end)) as errors,
        array_agg(case when o.outcome <> 'retry' or o.run_at is not null then o.run_at else (
            select _end_attempts.moment + pgqueue._retry_delay(o.attempt, s.retry_base, s.retry_cap)
            from pgqueue._in_force(o.queue, o.kind, o.group_key) as s
        ) end) as run_ats
    into given
    from (
        select
            j.id, j.attempt, j.queue, j.kind, j.group_key, e.*,
            case
                when j.cancelled_at is not null then 'cancelled'
                when e.verb = 'release' then 'released'
                when e.verb = 'reject' or j.attempt >= j.max_attempts then 'dead'
                else 'retry'
            end as outcome
        from unnest(picks, verbs, errors, run_ats) as e (place, verb, error, run_at)
        join pgqueue.job as j on j.ctid = e.place
    ) as o;
    perform pgqueue._end(given.picks, given.outcomes, given.errors, given.run_ats, moment);
    return query select u.id, u.outcome from unnest(given.ids, given.outcomes) as u (id, outcome);
end;
$$;

-- Ends what has expired among some picked jobs and the next thousand of their lane, from the first
-- on: so that one claim finds all that a dead worker held, but no claim has to end ten thousand.
create or replace function pgqueue._recover(queue text, lane int, picks tid[], first timestamptz, moment timestamptz)
    returns void
    language plpgsql
as $$
declare
    near tid[] := array(
        select j.ctid
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, _recover.queue, _recover.lane)
            and j.run_at between _recover.first and _recover.moment
        order by j.run_at, j.id
        limit 1000
    );
begin
    perform pgqueue._expire(
        array(
            select j.ctid
            from pgqueue.job as j
            where j.ctid = any (_recover.picks || near)
                and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _recover.moment
            for update skip locked
        ),
        moment
    );
end;
$$;
