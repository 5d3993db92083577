-- The worker's room.
--
-- A worker claims, works while it extends, and ends each attempt with complete, fail or
-- release. Every verb but claim names jobs by (id, token) and touches only those that
-- are still leased under that token.
--
-- What runs stays in its lane, leased, so claim() meets expired leases where it looks for
-- work and ends those attempts itself: recovery needs no daemon. reap() does the same
-- for queues from which nobody claims.
--
-- Locks: claim, reap and extend skip what is locked and never wait. The other verbs lock
-- jobs in the order of their ids. So no two of them wait for each other.
--
-- Plans: each statement is planned once for a session, with whatever statistics there are
-- then. A plan made while job is small would read all of it for ever, hence the settings
-- on the functions: jobs are found by ctid or by primary key, never by a scan.

create or replace function pgqueue._require_read_committed()
    returns void
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'active_sql_transaction',
        message = 'leases need the isolation level READ COMMITTED',
        detail = format('This transaction is %s.', upper(current_setting('transaction_isolation'))),
        hint = 'An older snapshot cannot see who holds a lease now. Use BEGIN ISOLATION LEVEL READ COMMITTED.';
end;
$$;

comment on function pgqueue._require_read_committed() is
'Raises 25001. Callers test the level themselves, because a call costs more than the test.';

create or replace function pgqueue._check_lease(lease interval)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if lease <= '0' or lease > '30 days' then
        perform pgqueue._refuse(
            'lease must be longer than nothing and at most 30 days',
            format('It is %s.', lease),
            'Take a short lease and extend it while the job runs.'
        );
    end if;
end;
$$;

comment on function pgqueue._check_lease(interval) is 'Raises 22023 for an absurd lease; null passes.';

create or replace function pgqueue._lost(job_id bigint, token bigint)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ002',
        message = format('the lease on job %s is lost', coalesce(_lost.job_id::text, 'null')),
        detail = format('It is not held under token %s.', coalesce(_lost.token::text, 'null')),
        hint = 'The lease expired, or the attempt has ended already. Discard the result: the job may be running elsewhere.';
end;
$$;

comment on function pgqueue._lost(bigint, bigint) is 'Raises PQ002.';

create or replace function pgqueue._log(picks tid[], outcome text, moment timestamptz)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    today int := floor(extract(epoch from moment) / 86400)::int;
begin
    insert into pgqueue.run (
        slot, attempt, job_id, finished_at, waited, taken,
        queue, kind, outcome, worker, result
    )
    select
        (today + kept.days) % 16,
        j.attempt, j.id, _log.moment,
        coalesce(j.claimed_at, _log.moment) - least(j.run_at, j.claimed_at, _log.moment),
        _log.moment - coalesce(j.claimed_at, _log.moment),
        j.queue, j.kind, _log.outcome, j.worker,
        case when _log.outcome = 'cancelled' then to_jsonb(j.cancel_reason) end
    from pgqueue.job as j
    left join pgqueue.queue as own on own.name = j.queue
    left join pgqueue.queue as shared on shared.name = ''
    cross join lateral (values (coalesce(own.keep_runs, shared.keep_runs, 7))) as kept (days)
    where j.ctid = any(_log.picks) and kept.days > 0;
end;
$$;

comment on function pgqueue._log(tid[], text, timestamptz) is
'Writes the present attempts of some locked jobs into run.';

create or replace function pgqueue._retry_delay(attempt int, retry_base interval, retry_cap interval)
    returns interval
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $$
    -- The exponent is capped before the power, or high attempts would overflow. Between
    -- half and all of it: jobs that failed together must not come back together.
    select make_interval(secs => (0.5 + random() / 2) * least(
        extract(epoch from _retry_delay.retry_cap)::float8,
        extract(epoch from _retry_delay.retry_base)::float8
            * power(2::float8, least(greatest(_retry_delay.attempt, 1) - 1, 60))
    ))
$$;

comment on function pgqueue._retry_delay(int, interval, interval) is
'How long to wait after a failed attempt: least(cap, base * 2^(attempt - 1)) times a random 0.5 to 1.';

create or replace function pgqueue._add_error(j pgqueue.job, error text, moment timestamptz)
    returns jsonb
    language sql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
    select
        case when jsonb_array_length((_add_error.j).errors) >= 10
            then (_add_error.j).errors - 0
            else (_add_error.j).errors
        end
        || jsonb_build_array(jsonb_build_object(
            'attempt', (_add_error.j).attempt,
            'at', _add_error.moment,
            'worker', (_add_error.j).worker,
            'error', _add_error.error
        ))
$$;

comment on function pgqueue._add_error(pgqueue.job, text, timestamptz) is
'A job''s errors with one more, the last 10.';

create or replace function pgqueue._finish(
    picks tid[], outcome text, error text, retry_at timestamptz, moment timestamptz
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    if cardinality(picks) = 0 then
        return;
    end if;
    perform pgqueue._log(picks, outcome, moment);

    if outcome = 'cancelled' then
        delete from pgqueue.job as j where j.ctid = any(picks);
    elsif outcome = 'dead' then
        with gone as (
            delete from pgqueue.job as j where j.ctid = any(picks)
            returning j.*
        )
        insert into pgqueue.dead_job (
            id, died_at, enqueued_at, run_at, claimed_at, priority, attempt, max_attempts,
            queue, kind, unique_key, group_key, worker, error, payload, headers, errors
        )
        select
            gone.id, _finish.moment, gone.enqueued_at, gone.run_at, gone.claimed_at,
            gone.priority, gone.attempt, gone.max_attempts, gone.queue, gone.kind,
            gone.unique_key, gone.group_key, gone.worker, _finish.error, gone.payload,
            gone.headers, pgqueue._add_error(gone, _finish.error, _finish.moment)
        from gone;
    else
        update pgqueue.job as j
        set run_at = coalesce(_finish.retry_at, j.run_at),
            token = null,
            claimed_at = null,
            lease_expires_at = null,
            worker = null,
            errors = pgqueue._add_error(j, _finish.error, _finish.moment)
        where j.ctid = any(picks);
    end if;
end;
$$;

comment on function pgqueue._finish(tid[], text, text, timestamptz, timestamptz) is
'Ends the attempts of some locked jobs that did not complete: back to work at retry_at (null: where they stand), to dead_job, or gone when cancelled.';

create or replace function pgqueue._expire(picks tid[], moment timestamptz)
    returns int
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    expired record;
    done int := 0;
begin
    for expired in
        select ended.outcome, array_agg(j.ctid) as picks
        from pgqueue.job as j
        cross join lateral (values (
            case
                when j.cancelled_at is not null then 'cancelled'
                when j.attempt >= j.max_attempts then 'dead'
                else 'expired'
            end
        )) as ended (outcome)
        where j.ctid = any(_expire.picks) and j.lease_expires_at is not null
        group by ended.outcome
    loop
        perform pgqueue._finish(
            expired.picks, expired.outcome,
            'the lease expired: the worker died or stopped extending it', null, moment
        );
        done := done + cardinality(expired.picks);
    end loop;
    return done;
end;
$$;

comment on function pgqueue._expire(tid[], timestamptz) is
'Ends the attempts of those among some locked jobs whose leases expired: back where they stood, dead when exhausted, gone when cancelled. Returns how many.';

create or replace function pgqueue._check_claim(
    queue text, worker text, max_jobs int, lease interval
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform pgqueue._require_read_committed();
    end if;
    if (octet_length(queue) between 1 and 200) is not true then
        perform pgqueue._refuse_name('queue', queue);
    end if;
    if (octet_length(worker) between 1 and 200) is not true then
        perform pgqueue._refuse_name('worker', worker);
    end if;
    perform pgqueue._check_lease(lease);
    if max_jobs not between 1 and 10000 then
        perform pgqueue._refuse(
            'max_jobs must be 1 to 10000',
            format('It is %s.', max_jobs),
            'Claim what you can begin within one lease.'
        );
    end if;
end;
$$;

comment on function pgqueue._check_claim(text, text, int, interval) is
'Raises 25001 outside READ COMMITTED, 22023 for what claim refuses.';

create or replace function pgqueue.claim(
    queue text,
    worker text,
    max_jobs int default 1,
    lease interval default null,
    kinds text[] default null
)
    returns setof pgqueue.job
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    -- Whatever the statistics say: the lane index gives the order, a sort never does.
    set enable_sort = off
as $$
declare
    settings pgqueue.queue;
    moment timestamptz := clock_timestamp();
    new_token bigint;
    picks tid[];
begin
    -- Two shortcuts for the plain call: its arguments are checked in one expression, and
    -- settings are read only where there are any.
    if (
        octet_length(queue) between 1 and 200 and octet_length(worker) between 1 and 200
        and max_jobs between 1 and 10000 and lease is null
        and current_setting('transaction_isolation') = 'read committed'
    ) is not true then
        perform pgqueue._check_claim(queue, worker, max_jobs, lease);
    end if;
    if pg_relation_size('pgqueue.queue') > 0 then
        settings := pgqueue._settings(queue);
        if settings.paused then
            return;
        end if;
        lease := coalesce(lease, settings.lease);
    end if;

    picks := pgqueue._pick(queue, kinds, coalesce(max_jobs, 1), moment);
    if picks = '{}' then
        return;
    end if;
    moment := clock_timestamp();
    new_token := nextval('pgqueue.token_seq');
    return query
    -- A join, not "any": it keeps the order of the picks.
    update pgqueue.job as j
    set token = new_token,
        attempt = j.attempt + 1,
        worker = claim.worker,
        claimed_at = moment,
        lease_expires_at = moment + coalesce(claim.lease, '30 seconds')
    from unnest(picks) as p (place)
    where j.ctid = p.place
    returning j.*;
end;
$$;

comment on function pgqueue.claim(text, text, int, interval, text[]) is
'Takes up to max_jobs due jobs of a queue (only of these kinds, if given) and returns them in the order in which to run them: highest priority, then run_at, then id. Each counts one attempt and is leased under its token until lease_expires_at; recovers expired leases on the way; never waits. Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

create or replace function pgqueue._check_leases(job_ids bigint[], tokens bigint[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform pgqueue._require_read_committed();
    end if;
    if cardinality(job_ids) is distinct from cardinality(tokens) then
        perform pgqueue._refuse(
            'job_ids and tokens must be equally long',
            format(
                'There are %s ids and %s tokens.',
                coalesce(cardinality(job_ids), 0), coalesce(cardinality(tokens), 0)
            ),
            'Pass the token that claim returned for each job.'
        );
    end if;
end;
$$;

comment on function pgqueue._check_leases(bigint[], bigint[]) is
'Raises 25001 outside READ COMMITTED, 22023 for arrays of unequal length.';

create or replace function pgqueue._held(job_ids bigint[], tokens bigint[])
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    perform pgqueue._check_leases(job_ids, tokens);
    return array(
        select j.ctid
        from pgqueue.job as j
        where j.id = any (_held.job_ids)
            and (j.id, j.token) in (
                select h.id, h.token from unnest(_held.job_ids, _held.tokens) as h (id, token)
            )
        order by j.id
        for update
    );
end;
$$;

comment on function pgqueue._held(bigint[], bigint[]) is
'Locks those jobs that are leased under these tokens, in the order of their ids, and returns where they are.';

create or replace function pgqueue.extend(
    job_ids bigint[],
    tokens bigint[],
    lease interval default null
)
    returns table (job_id bigint, status text)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    picks tid[];
begin
    perform pgqueue._check_leases(job_ids, tokens);
    if lease is not null then
        perform pgqueue._check_lease(lease);
    end if;

    -- A heartbeat never waits: a handler that has completed its job and not yet committed
    -- holds the row, and the leases of all the other jobs would run out behind it.
    picks := array(
        select j.ctid
        from pgqueue.job as j
        where j.id = any (extend.job_ids)
            and (j.id, j.token) in (
                select h.id, h.token from unnest(extend.job_ids, extend.tokens) as h (id, token)
            )
        order by j.id
        for update skip locked
    );
    update pgqueue.job as j
    set lease_expires_at = clock_timestamp() + coalesce(
        extend.lease,
        (select q.lease from pgqueue.queue as q where q.name = j.queue),
        (select q.lease from pgqueue.queue as q where q.name = ''),
        '30 seconds'
    )
    where j.ctid = any (picks);

    return query
    select
        h.id,
        coalesce(
            (
                select case when j.cancelled_at is null then 'held' else 'cancelled' end
                from pgqueue.job as j
                where j.id = h.id and j.token = h.token
            ),
            'lost'
        )
    from unnest(extend.job_ids, extend.tokens) with ordinality as h (id, token, place)
    order by h.place;
end;
$$;

comment on function pgqueue.extend(bigint[], bigint[], interval) is
'The heartbeat: lets leases last for another lease from now, and says of each job whether it is held, cancelled (stop working, then call fail or release) or lost (stop working, report nothing). A lease that expired but that nobody recovered is held again; one that an open transaction is just ending is held, but not extended, so that this never waits. Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

-- The columns of _log() once more, here and in complete_many: this is the hottest path of
-- all, and to lock the jobs first, as the other verbs do, costs half as much again. For one
-- job two plain statements are the cheapest, for many one with two parts.
create or replace function pgqueue.complete(job_id bigint, token bigint, result jsonb default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    today int := floor(extract(epoch from moment) / 86400)::int;
    keep_runs int := 7;
    done record;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform pgqueue._require_read_committed();
    end if;

    delete from pgqueue.job as j
    where j.id = complete.job_id and j.token = complete.token
    returning j.attempt, j.run_at, j.claimed_at, j.queue, j.kind, j.worker into done;
    if not found then
        perform pgqueue._lost(job_id, token);
    end if;

    if pg_relation_size('pgqueue.queue') > 0 then
        keep_runs := (pgqueue._settings(done.queue)).keep_runs;
    end if;
    if keep_runs > 0 then
        insert into pgqueue.run (
            slot, attempt, job_id, finished_at, waited, taken,
            queue, kind, outcome, worker, result
        )
        values (
            (today + keep_runs) % 16, done.attempt, complete.job_id, moment,
            done.claimed_at - least(done.run_at, done.claimed_at), moment - done.claimed_at,
            done.queue, done.kind, 'completed', done.worker, complete.result
        );
    end if;
end;
$$;

comment on function pgqueue.complete(bigint, bigint, jsonb) is
'Finishes a job. Call it in the transaction of the handler''s own writes and they commit together: when the lease is lost it raises PQ002 and both roll back. Also raises 25001 outside READ COMMITTED.';

create or replace function pgqueue.complete_many(job_ids bigint[], tokens bigint[])
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    -- An index scan meets the jobs, and locks them, in the order of their ids.
    set enable_bitmapscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    today int := floor(extract(epoch from moment) / 86400)::int;
    is_configured boolean := pg_relation_size('pgqueue.queue') > 0;
begin
    perform pgqueue._check_leases(job_ids, tokens);
    return query
    with done as (
        delete from pgqueue.job as j
        where j.id = any (complete_many.job_ids)
            -- "Is true" keeps this a filter: as a join it might come first.
            and ((j.id, j.token) in (
                select h.id, h.token
                from unnest(complete_many.job_ids, complete_many.tokens) as h (id, token)
            )) is true
        returning j.id, j.attempt, j.run_at, j.claimed_at, j.queue, j.kind, j.worker
    ), logged as (
        insert into pgqueue.run (
            slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker
        )
        select
            (today + kept.days) % 16, d.attempt, d.id, moment,
            d.claimed_at - least(d.run_at, d.claimed_at), moment - d.claimed_at,
            d.queue, d.kind, 'completed', d.worker
        from done as d
        cross join lateral (
            select coalesce(
                case when is_configured then coalesce(
                    (select q.keep_runs from pgqueue.queue as q where q.name = d.queue),
                    (select q.keep_runs from pgqueue.queue as q where q.name = '')
                ) end,
                7
            )
            offset 0
        ) as kept (days)
        where kept.days > 0
    )
    select d.id from done as d;
end;
$$;

comment on function pgqueue.complete_many(bigint[], bigint[]) is
'Finishes many jobs and returns the ids of those whose lease was held; the others were lost, and stay as they are. Raises 25001 outside READ COMMITTED, 22023 (arrays of unequal length).';

create or replace function pgqueue.fail(
    job_id bigint,
    token bigint,
    error text,
    retry_in interval default null,
    permanent boolean default false
)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    picks tid[];
    j pgqueue.job;
    settings pgqueue.queue;
    outcome text := 'retry';
begin
    if retry_in < '0' or retry_in > '1000 years' then
        perform pgqueue._refuse(
            'retry_in must be finite and not negative',
            format('It is %s.', retry_in),
            'Leave it out for the delay that the queue''s settings give.'
        );
    end if;
    picks := pgqueue._held(array[job_id], array[token]);
    select k.* into j from pgqueue.job as k where k.ctid = picks[1];
    if not found then
        perform pgqueue._lost(job_id, token);
    end if;

    if j.cancelled_at is not null then
        outcome := 'cancelled';
    elsif permanent or j.attempt >= j.max_attempts then
        outcome := 'dead';
    end if;
    settings := pgqueue._settings(j.queue);
    retry_in := coalesce(
        retry_in, pgqueue._retry_delay(j.attempt, settings.retry_base, settings.retry_cap)
    );
    -- Recording a failure never fails: whatever text came is kept, or its beginning.
    perform pgqueue._finish(
        picks, outcome, coalesce(left(error, 8000), 'no error text'), moment + retry_in, moment
    );
    if outcome = 'retry' then
        -- Sleepers must hear of the new run_at.
        perform pgqueue._wake(j.queue);
    end if;
    return outcome;
end;
$$;

comment on function pgqueue.fail(bigint, bigint, text, interval, boolean) is
'Ends an attempt that went wrong. Returns retry (the job runs again after retry_in, or after the queue''s backoff: least(retry_cap, retry_base * 2^(attempt - 1)) times a random 0.5 to 1), dead (attempts used up, or permanent) or cancelled (an operator asked for it). Keeps the first 8000 characters of the error. Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED, 22023 (bad argument).';

create or replace function pgqueue.release(
    job_ids bigint[],
    tokens bigint[],
    run_at timestamptz default null
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    picks tid[];
    cancelled tid[];
    released bigint[];
    queues text[];
begin
    if run_at not between '1970-01-01' and '9998-12-31' then
        perform pgqueue._refuse_run_at(run_at);
    end if;
    picks := pgqueue._held(job_ids, tokens);
    cancelled := array(
        select j.ctid from pgqueue.job as j
        where j.ctid = any (picks) and j.cancelled_at is not null
    );
    released := array(select j.id from pgqueue.job as j where j.ctid = any (cancelled));
    perform pgqueue._finish(cancelled, 'cancelled', null, null, clock_timestamp());

    with given_back as (
        update pgqueue.job as j
        set run_at = coalesce(release.run_at, j.run_at),
            attempt = j.attempt - 1,
            token = null,
            claimed_at = null,
            lease_expires_at = null,
            worker = null
        where j.ctid = any (picks)
        returning j.id, j.queue
    )
    select released || array_agg(g.id), array_agg(distinct g.queue)
    into released, queues
    from given_back as g;

    perform pgqueue._reopened(queues);
    return query select r.id from unnest(released) as r (id);
end;
$$;

comment on function pgqueue.release(bigint[], bigint[], timestamptz) is
'Gives jobs back unharmed: the attempt is not counted, and each keeps its place in its lane, or runs again at run_at (a snooze). One that was cancelled is gone. Returns the ids whose lease was held. Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

create or replace function pgqueue.reap(max_jobs int default 1000)
    returns int
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
as $$
declare
    moment timestamptz := clock_timestamp();
    picks tid[];
    queues text[];
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform pgqueue._require_read_committed();
    end if;
    if max_jobs < 1 then
        perform pgqueue._refuse(
            'max_jobs must be at least 1', format('It is %s.', max_jobs), 'Leave it out for 1000.'
        );
    end if;

    -- A walk over the whole table: an index on the lease would be written by every claim
    -- and every heartbeat, and claims find what expired without one.
    picks := array(
        select j.ctid
        from pgqueue.job as j
        where j.lease_expires_at <= moment
        limit coalesce(reap.max_jobs, 1000)
        for update skip locked
    );
    queues := array(
        select distinct j.queue from pgqueue.job as j where j.ctid = any (picks)
    );
    perform pgqueue._reopened(queues);
    return pgqueue._expire(picks, moment);
end;
$$;

comment on function pgqueue.reap(int) is
'Ends the attempts of up to max_jobs jobs whose lease expired, and returns how many: each goes back where it stood in its lane, or to dead_job when its attempts are used up. Claims do this for their own queue; any number of reaps may run at once. Raises 25001 outside READ COMMITTED, 22023 (bad argument).';
