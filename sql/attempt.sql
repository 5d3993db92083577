-- The ends of attempts that did not complete: how long to wait, what is kept of the error, and
-- where the job goes. Only this module moves a job to dead_job or sends it back. Its callers have
-- locked the jobs.

create or replace function pgqueue._retry_delay(attempt int, retry_base interval, retry_cap interval)
    returns interval
    language plpgsql
    volatile
as $$
begin
    -- The exponent is capped before the power, or high attempts would overflow. Between
    -- half and all of it: jobs that failed together must not come back together.
    return make_interval(secs => (0.5 + random() / 2) * least(
        extract(epoch from retry_cap)::float8,
        extract(epoch from retry_base)::float8
            * power(2::float8, least(greatest(attempt, 1) - 1, 60))
    ));
end;
$$;

comment on function pgqueue._retry_delay(int, interval, interval) is
'How long to wait after a failed attempt: least(cap, base * 2^(attempt - 1))
times a random 0.5 to 1.';

create or replace function pgqueue._summary(error text)
    returns text
    language plpgsql
    immutable
as $$
begin
    return left(split_part(ltrim(error, E' \t\r\n'), E'\n', 1), 500);
end;
$$;

comment on function pgqueue._summary(text) is
'The first line of an error, used to find, count and log it.';

create or replace function pgqueue._add_error(job pgqueue.job, error text, moment timestamptz)
    returns jsonb
    language plpgsql
    immutable
as $$
begin
    return case when jsonb_array_length(job.errors) >= 10 then job.errors - 0 else job.errors end
        || jsonb_build_array(jsonb_build_object(
            'attempt', job.attempt, 'at', moment, 'worker', job.worker, 'error', error
        ));
end;
$$;

comment on function pgqueue._add_error(pgqueue.job, text, timestamptz) is
'A job''s errors and a new one, the last 10.';

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
        slot, attempt, job_id, finished_at, waited, taken,
        queue, kind, outcome, worker, result, error,
        payload, headers, options
    )
    select
        (today + settings.keep_runs) % 16,
        j.attempt, j.id, _log.moment,
        coalesce(j.claimed_at, _log.moment) - least(j.run_at, j.claimed_at, _log.moment),
        _log.moment - coalesce(j.claimed_at, _log.moment),
        j.queue, j.kind, e.outcome, j.worker,
        case when e.outcome = 'cancelled' then to_jsonb(coalesce(j.cancel_reason, e.error)) else e.result end,
        case when e.outcome <> 'cancelled' then pgqueue._summary(e.error) end,
        kept.*
    from unnest(picks, outcomes, errors, results) as e (place, outcome, error, result)
    join pgqueue.job as j on j.ctid = e.place
    cross join lateral pgqueue._in_force(j.queue, j.kind, j.group_key) as settings
    -- One that is dead is kept in dead_job; the others go on.
    left join lateral (
        select j.payload, j.headers, jsonb_build_object(
            'priority', j.priority, 'max_attempts', j.max_attempts, 'group_key', j.group_key
        )
    ) as kept on settings.keep_payloads and e.outcome in ('completed', 'cancelled')
    where settings.keep_runs > 0;
end;
$$;

comment on function pgqueue._log(tid[], text[], text[], timestamptz, jsonb[]) is
'Writes the current attempts of some locked jobs into run.';

create or replace function pgqueue._log_kept(
    job_ids bigint[], tokens bigint[], results jsonb[], moment timestamptz
)
    returns boolean
    language plpgsql
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    done record;
begin
    if not exists (
        select from pgqueue.queue as q
        where num_nonnulls(q.keep_runs, q.keep_payloads) > 0 and q.keep_payloads
    ) then
        return false;
    end if;
    select
        array_agg(j.ctid) as picks, array_agg('completed'::text) as outcomes,
        array_agg(given.result) as results
    into done
    from unnest(pgqueue._lock_held(job_ids, tokens)) as held (place)
    join pgqueue.job as j on j.ctid = held.place
    left join (
        select distinct on (u.id, u.token) u.*
        from unnest(job_ids, tokens, results) as u (id, token, result)
    ) as given on given.id = j.id and given.token = j.token;
    perform pgqueue._log(done.picks, done.outcomes, null, moment, done.results);
    return true;
end;
$$;

comment on function pgqueue._log_kept(bigint[], bigint[], jsonb[], timestamptz) is
'Locks jobs that are about to complete and writes them into run, if anything
sets keep_payloads; else leaves that to the caller, which is faster.';

create or replace function pgqueue._end(
    picks tid[], outcomes text[], errors text[], retry_ats timestamptz[], moment timestamptz
)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    of_groups record;
    kept_ids bigint[];
    gone record;
    is_tied boolean;
    ends text[];
begin
    if cardinality(picks) = 0 then
        return;
    end if;
    perform pgqueue._log(picks, outcomes, errors, moment);
    -- As a condition it would use the index of all jobs that have a group.
    select
        array_agg(g.queue) as queues, array_agg(g.group_key) as keys, array_agg(g.priority) as priorities,
        array_agg(case when g.outcome in ('retry', 'expired') then g.run_at else 'infinity' end) as ats
    into of_groups
    from (
        select j.queue, j.group_key, j.priority, e.outcome, coalesce(e.retry_at, j.run_at) as run_at
        from unnest(picks, outcomes, retry_ats) as e (place, outcome, retry_at)
        join pgqueue.job as j on j.ctid = e.place
        offset 0
    ) as g
    where g.group_key is not null;
    kept_ids := array(
        select j.id
        from unnest(picks, outcomes) as e (place, outcome)
        join pgqueue.job as j on j.ctid = e.place
        where e.outcome in ('retry', 'expired') and j.permits is not null and case when j.group_key is not null
            then (pgqueue._in_force(j.queue, j.kind, j.group_key)).group_on_retry = 'block'
        end
    );
    perform pgqueue._return_permits_of(picks, kept_ids);

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

    with deleted as (
        delete from pgqueue.job as j
        where j.ctid = any (array(
            select e.place
            from unnest(picks, outcomes) as e (place, outcome)
            where e.outcome in ('dead', 'cancelled')
        ))
        returning j.id, j.queue, (j.terms).batch_id
    )
    select array_agg(d.id) as ids, array_agg(d.queue) as queues, array_agg(d.batch_id) as batches
    into gone
    from deleted as d;
    perform pgqueue._tell_end(gone.ids, gone.queues);
    if 'cancelled' = any (outcomes) then
        perform pgqueue._note_gone(array(
            select g.id from unnest(gone.ids) as g (id)
            where (select true from pgqueue.dead_job as d where d.id = g.id) is not true
        ));
    end if;
    is_tied := pg_relation_size('pgqueue.dependency') > 0;
    if gone.ids is not null and (is_tied or num_nonnulls(variadic gone.batches) > 0) then
        ends := array(
            select case when d.id is null then 'cancelled' else 'dead' end
            from unnest(gone.ids) with ordinality as g (id, place)
            left join pgqueue.dead_job as d on d.id = g.id
            order by g.place
        );
        -- First, because a batch counts them if it ends with the jobs that wait for them.
        perform pgqueue._leave_batches(gone.batches, ends);
        if is_tied then
            perform pgqueue._cut_ties(gone.ids);
        end if;
    end if;

    update pgqueue.job as j
    set run_at = coalesce(e.retry_at, j.run_at),
        permits = case when j.id = any (kept_ids) then j.permits end,
        token = null,
        claimed_at = null,
        lease_expires_at = null,
        worker = null,
        progress = null,
        errors = pgqueue._add_error(j, e.error, _end.moment)
    from unnest(_end.picks, _end.outcomes, _end.errors, _end.retry_ats)
        as e (place, outcome, error, retry_at)
    where j.ctid = e.place and e.outcome in ('retry', 'expired');
    if of_groups.keys is not null then
        perform pgqueue._insert_tickets(of_groups.queues, of_groups.keys, of_groups.priorities, of_groups.ats);
    end if;
end;
$$;

comment on function pgqueue._end(tid[], text[], text[], timestamptz[], timestamptz) is
'Ends the attempts of some locked jobs that did not complete, each by its
outcome: retry and expired go back to work at retry_at (null: at their old
place), dead to dead_job, cancelled is gone.';

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
            -- A worker that held many did not fail because of each of them; one that held one, perhaps.
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
        where j.ctid = any (_expire.picks)
            and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _expire.moment
    ) as e;
    perform pgqueue._end(coalesce(ended.picks, '{}'), ended.outcomes, ended.errors, null, moment);
    return coalesce(cardinality(ended.picks), 0);
end;
$$;

comment on function pgqueue._expire(tid[], timestamptz) is
'Ends what is over among some locked jobs, and returns how many. Attempts whose
leases expired: back to their place, dead if exhausted, gone if cancelled.
Waiting jobs that may not begin any more: cancelled.';

create or replace function pgqueue._give_back(picks tid[], run_ats timestamptz[])
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
as $$
declare
    back record;
begin
    perform pgqueue._return_permits_of(picks);
    with given_back as (
        update pgqueue.job as j
        set run_at = coalesce(e.run_at, j.run_at),
            permits = null,
            attempt = j.attempt - 1,
            token = null,
            claimed_at = null,
            lease_expires_at = null,
            worker = null,
            progress = null
        from unnest(picks, run_ats) as e (place, run_at)
        where j.ctid = e.place
        returning j.queue, j.priority, j.group_key, j.run_at
    )
    select
        array_agg(g.queue) as queues, array_agg(g.priority) as priorities, array_agg(g.group_key) as keys,
        array_agg(g.run_at) as run_ats
    into back
    from given_back as g;
    perform pgqueue._reopened(back.queues, back.priorities, back.keys, back.run_ats);
end;
$$;

comment on function pgqueue._give_back(tid[], timestamptz[]) is
'Gives some locked jobs back without counting the attempt, each at its run_at;
null: at its old place.';

create or replace function pgqueue._release(picks tid[], run_ats timestamptz[])
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
        array_agg(e.place) filter (where j.cancelled_at is null) as picks,
        array_agg(e.run_at) filter (where j.cancelled_at is null) as run_ats,
        array_agg(e.place) filter (where j.cancelled_at is not null) as cancelled,
        array_agg(j.id) as ids,
        array_agg(case when j.cancelled_at is null then 'released' else 'cancelled' end) as statuses
    into given
    from unnest(picks, run_ats) as e (place, run_at)
    join pgqueue.job as j on j.ctid = e.place;

    if given.cancelled is not null then
        perform pgqueue._end(
            given.cancelled, array_fill('cancelled'::text, array[cardinality(given.cancelled)]),
            null, null, clock_timestamp()
        );
    end if;
    perform pgqueue._give_back(given.picks, given.run_ats);
    return query select u.id, u.status from unnest(given.ids, given.statuses) as u (id, status);
end;
$$;

comment on function pgqueue._release(tid[], timestamptz[]) is
'release, for some locked jobs: released or cancelled for each.';

create or replace function pgqueue._fail(
    picks tid[], errors text[], delays interval[], permanents boolean[], moment timestamptz
)
    returns table (job_id bigint, status text)
    language plpgsql
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    failed record;
begin
    select
        array_agg(j.id) as ids,
        array_agg(e.place) as picks,
        array_agg(
            case
                when j.cancelled_at is not null then 'cancelled'
                when e.permanent or j.attempt >= j.max_attempts then 'dead'
                else 'retry'
            end
        ) as outcomes,
        -- Recording a failure never fails: any text is kept, or its beginning.
        array_agg(coalesce(left(e.error, 8000), 'no error text')) as errors,
        array_agg(_fail.moment + coalesce(
            e.delay, pgqueue._retry_delay(j.attempt, settings.retry_base, settings.retry_cap)
        )) as retry_ats,
        array_agg(j.queue) as queues
    into failed
    from unnest(picks, errors, delays, permanents) as e (place, error, delay, permanent)
    join pgqueue.job as j on j.ctid = e.place
    cross join lateral pgqueue._in_force(j.queue, j.kind, j.group_key) as settings;

    perform pgqueue._end(
        coalesce(failed.picks, '{}'), failed.outcomes, failed.errors, failed.retry_ats, moment
    );
    -- Sleeping workers must learn of the new run_at.
    perform pgqueue._wake(f.queue)
    from (
        select distinct u.queue
        from unnest(failed.queues, failed.outcomes) as u (queue, outcome)
        where u.outcome = 'retry'
    ) as f;
    return query select u.id, u.outcome from unnest(failed.ids, failed.outcomes) as u (id, outcome);
end;
$$;

comment on function pgqueue._fail(tid[], text[], interval[], boolean[], timestamptz) is
'Ends the attempts of some locked jobs that went wrong; retry, dead or
cancelled for each.';
