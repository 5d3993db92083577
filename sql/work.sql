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
-- on the functions: jobs are found by ctid or by primary key, never by a scan, whatever ways
-- the caller has switched off. Nor is a statement compiled: a way that is off and has to be gone
-- all the same looks so dear that Postgres would, for longer than all the rest takes.

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

create or replace function pgqueue._check_read_only()
    returns void
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_read_only') = 'on' then
        raise exception using
            errcode = 'read_only_sql_transaction',
            message = 'cannot claim in a read-only transaction',
            detail = case when pg_is_in_recovery()
                then 'This server is a standby.'
                else 'This transaction is READ ONLY, or the default of this session or server is.'
            end,
            hint = 'Work on the primary, in a transaction that may write.';
    end if;
end;
$$;

comment on function pgqueue._check_read_only() is
'Raises 25006: who finds nothing where it could claim nothing shall know.';

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
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    settings pgqueue.queue;
    moment timestamptz := clock_timestamp();
    key bigint := hashtextextended(queue, 1000);
    noted bigint;
    new_token bigint;
    picks tid[] := '{}'::tid[];
begin
    -- Three shortcuts for the plain call: its arguments are checked in one expression,
    -- settings are read only where there are any, and so are lanes.
    if (
        octet_length(queue) between 1 and 200 and octet_length(worker) between 1 and 200
        and max_jobs between 1 and 10000 and lease is null
        and current_setting('transaction_isolation') = 'read committed'
    ) is not true then
        perform pgqueue._check_claim(queue, worker, max_jobs, lease);
        max_jobs := coalesce(max_jobs, 1);
    end if;
    if pg_relation_size('pgqueue.queue') > 0 then
        settings := pgqueue._settings(queue);
        if settings.paused then
            return;
        end if;
        lease := coalesce(lease, settings.lease);
    end if;

    noted := pg_sequence_last_value(('pgqueue._cell_' || (key & 127) * 5)::regclass)
        # ((key >> 20 & 4095) << 51);
    if noted & 1 = 0
        and noted - (date_part('epoch', moment) * 1000000)::bigint + 1577836800000000
            between 1 and 60000000
    then
        picks := pgqueue._pick(queue, kinds, 0, max_jobs, moment, false);
    end if;
    if picks = '{}' then
        picks := pgqueue._pick_lanes(queue, kinds, max_jobs, moment, pgqueue._noted_lanes(queue, moment));
        if picks = '{}' then
            perform pgqueue._check_read_only();
            return;
        end if;
    end if;
    if current_setting('pgqueue.parked', true) <> '' then
        perform pgqueue._unpark_if_busy(moment);
    end if;

    moment := clock_timestamp();
    new_token := nextval('pgqueue.token_seq');
    -- One job has no order, and a sort would cost it a tenth of its claim: with it the heap grows
    -- past what glibc keeps, and is given back and asked for again at each call.
    if cardinality(picks) = 1 then
        return query
        update pgqueue.job as j
        set token = new_token,
            attempt = j.attempt + 1,
            worker = claim.worker,
            claimed_at = moment,
            lease_expires_at = moment + coalesce(claim.lease, '30 seconds')
        where j.ctid = any (picks)
        returning j.*;
        return;
    end if;
    return query
    with leased as (
        update pgqueue.job as j
        set token = new_token,
            attempt = j.attempt + 1,
            worker = claim.worker,
            claimed_at = moment,
            lease_expires_at = moment + coalesce(claim.lease, '30 seconds')
        where j.ctid = any (picks)
        returning j.*
    )
    -- No plan decides the order.
    select l.* from leased as l order by l.priority desc, l.run_at, l.id;
end;
$$;

comment on function pgqueue.claim(text, text, int, interval, text[]) is
'Takes up to max_jobs due jobs of a queue (only of these kinds, if given) and returns them in the order in which to run them: highest priority, then run_at, then id. Each counts one attempt and is leased under its token until lease_expires_at; recovers expired leases on the way; never waits. A claim counts from its commit: one that is rolled back, or that a crash cuts off, never happened. Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

create or replace function pgqueue._check_claim_from(queues text[], weights int[], limits int[])
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._check_queues(queues);
    if cardinality(weights) <> cardinality(queues) or cardinality(limits) <> cardinality(queues) then
        perform pgqueue._refuse(
            'weights and limits must be as long as queues',
            format(
                'There are %s queues, %s weights and %s limits.', cardinality(queues),
                coalesce(cardinality(weights), 0), coalesce(cardinality(limits), 0)
            ),
            'Leave them out for equal shares without limits; a null in them is the default.'
        );
    end if;
    if 1 > any (weights) or 0 > any (limits) then
        perform pgqueue._refuse(
            'every weight must be at least 1, every limit at least 0',
            format('Weights are %s, limits %s.', weights, limits),
            'A queue of twice the weight gets twice the share.'
        );
    end if;
end;
$$;

comment on function pgqueue._check_claim_from(text[], int[], int[]) is
'Raises 22023 for what claim_from refuses beyond what claim does.';

create or replace function pgqueue.claim_from(
    queues text[],
    worker text,
    max_jobs int default 1,
    lease interval default null,
    kinds text[] default null,
    weights int[] default null,
    limits int[] default null
)
    returns setof pgqueue.job
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    wanted int := coalesce(max_jobs, 1);
    start float8 := random();
    turn record;
    share int;
    found_jobs int;
    rest_of text[] := '{}'::text[];
    rest_limits int[] := '{}'::int[];
begin
    perform pgqueue._check_claim_from(queues, weights, limits);
    perform pgqueue._check_claim(queues[1], worker, max_jobs, lease);
    -- Twice round: first each queue up to its share, then those that had more. Shares are rounded
    -- up or down at random, so that they are right on average also where each is less than one
    -- job (systematic sampling, Madow 1949), and the order is drawn by weight (Efraimidis and
    -- Spirakis 2006).
    for turn in
        select
            q.queue,
            least(q.most, wanted) as most,
            (floor(q.upto + start) - floor(q.upto - q.part + start))::int as share
        from (
            select p.*, sum(p.part) over (order by p.place) as upto
            from (
                select
                    u.*,
                    wanted * coalesce(u.weight, 1)::float8 / sum(coalesce(u.weight, 1)) over () as part
                from unnest(queues, weights, limits) with ordinality as u (queue, weight, most, place)
            ) as p
        ) as q
        order by -ln(1 - random()) / coalesce(q.weight, 1)
    loop
        share := least(turn.share, turn.most, wanted);
        found_jobs := 0;
        if share > 0 then
            return query select * from pgqueue.claim(turn.queue, worker, share, lease, kinds);
            get diagnostics found_jobs = row_count;
            wanted := wanted - found_jobs;
        end if;
        if found_jobs = share then
            rest_of := rest_of || turn.queue;
            rest_limits := rest_limits || turn.most - share;
        end if;
    end loop;
    for turn in select r.queue, r.most from unnest(rest_of, rest_limits) as r (queue, most) loop
        share := least(turn.most, wanted);
        continue when share = 0;
        return query select * from pgqueue.claim(turn.queue, worker, share, lease, kinds);
        get diagnostics found_jobs = row_count;
        wanted := wanted - found_jobs;
    end loop;
end;
$$;

comment on function pgqueue.claim_from(text[], text, int, interval, text[], int[], int[]) is
'claim over several queues in one call: up to max_jobs in all, shared by weight (default 1 each), at most limits[i] of queues[i] (null: no limit). What a queue leaves of its share goes to those that have more, so a full queue starves no other and an empty one costs nothing. Returns the jobs of one queue after those of another, each in the order of claim. Raises as claim, and 22023 (bad argument).';

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
            and ((j.id, j.token) in (
                select h.id, h.token from unnest(_held.job_ids, _held.tokens) as h (id, token)
            )) is true
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
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    moment timestamptz := clock_timestamp();
    picks tid[];
begin
    perform pgqueue._check_leases(job_ids, tokens);
    perform pgqueue._check_lease(lease);

    -- A heartbeat never waits: a handler that has completed its job and not yet committed
    -- holds the row, and the leases of all the other jobs would run out behind it.
    picks := array(
        select j.ctid
        from pgqueue.job as j
        where j.id = any (extend.job_ids)
            and ((j.id, j.token) in (
                select h.id, h.token from unnest(extend.job_ids, extend.tokens) as h (id, token)
            )) is true
        order by j.id
        for update skip locked
    );
    update pgqueue.job as j
    set lease_expires_at = case
            when extend.lease is not null then moment + extend.lease
            -- A claim may have asked for longer than the default.
            else greatest(j.lease_expires_at, moment + coalesce(
                (select q.lease from pgqueue.queue as q where q.name = j.queue),
                (select q.lease from pgqueue.queue as q where q.name = ''),
                '30 seconds'
            ))
        end
    where j.ctid = any (picks);

    -- What somebody else has locked is held as long as the lease it had before.
    return query
    select
        h.id,
        coalesce(
            (
                select case
                    when j.cancelled_at is not null then 'cancelled'
                    when j.lease_expires_at > moment then 'held'
                end
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
'The heartbeat: lets leases last for another lease from now (without one: for the default, but never shorter than before), and says of each job whether it is held, cancelled (stop working, then call fail or release) or lost (stop working, report nothing). A lease that expired but that nobody recovered is held again. This never waits: a job that an open transaction has locked keeps the lease that it had, held while that lasts and lost after it. Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

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

create or replace function pgqueue.complete_many(
    job_ids bigint[],
    tokens bigint[],
    results jsonb[] default null
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    -- An index scan meets the jobs, and locks them, in the order of their ids.
    set enable_bitmapscan = off
    set enable_indexscan = on
as $$
declare
    moment timestamptz := clock_timestamp();
    today int := floor(extract(epoch from moment) / 86400)::int;
    is_configured boolean := pg_relation_size('pgqueue.queue') > 0;
begin
    perform pgqueue._check_leases(job_ids, tokens);
    if cardinality(results) <> cardinality(job_ids) then
        perform pgqueue._refuse(
            'results must be as long as job_ids',
            format('There are %s ids and %s results.', cardinality(job_ids), cardinality(results)),
            'Use null for a job without a result.'
        );
    end if;
    return query
    with done as (
        delete from pgqueue.job as j
        where j.id = any (complete_many.job_ids)
            -- "Is true" keeps this a filter: as a join it might come first.
            and ((j.id, j.token) in (
                select h.id, h.token
                from unnest(complete_many.job_ids, complete_many.tokens) as h (id, token)
            )) is true
        returning j.id, j.token, j.attempt, j.run_at, j.claimed_at, j.queue, j.kind, j.worker
    ), logged as (
        insert into pgqueue.run (
            slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker, result
        )
        select
            (today + kept.days) % 16, d.attempt, d.id, moment,
            d.claimed_at - least(d.run_at, d.claimed_at), moment - d.claimed_at,
            d.queue, d.kind, 'completed', d.worker,
            given.result
        from done as d
        left join (
            select distinct on (h.id, h.token) h.*
            from unnest(
                case when complete_many.results is not null then complete_many.job_ids end,
                case when complete_many.results is not null then complete_many.tokens end,
                complete_many.results
            ) as h (id, token, result)
        ) as given on given.id = d.id and given.token = d.token
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

comment on function pgqueue.complete_many(bigint[], bigint[], jsonb[]) is
'Finishes many jobs, with their results if there are any, and returns the ids of those whose lease was held; the others were lost, and stay as they are. Raises 25001 outside READ COMMITTED, 22023 (arrays of unequal length).';

create or replace function pgqueue._check_delay(what text, delay interval)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if delay < '0' or delay > '1000 years' then
        perform pgqueue._refuse(
            format('%s must be finite and not negative', what),
            format('It is %s.', delay),
            'Leave it out for the delay that the queue''s settings give.'
        );
    end if;
end;
$$;

comment on function pgqueue._check_delay(text, interval) is
'Raises 22023 for an absurd delay; null passes.';

create or replace function pgqueue._give_back(picks tid[], run_ats timestamptz[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    queues text[];
    lanes int[];
begin
    with given_back as (
        update pgqueue.job as j
        set run_at = coalesce(e.run_at, j.run_at),
            attempt = j.attempt - 1,
            token = null,
            claimed_at = null,
            lease_expires_at = null,
            worker = null
        from unnest(picks, run_ats) as e (place, run_at)
        where j.ctid = e.place
        returning j.queue, j.priority
    )
    select array_agg(g.queue), array_agg(g.priority)
    into queues, lanes
    from given_back as g;
    perform pgqueue._reopened(queues, lanes);
end;
$$;

comment on function pgqueue._give_back(tid[], timestamptz[]) is
'Gives some locked jobs back without counting the attempt, each at its run_at; null: where it stands.';

create or replace function pgqueue._release(picks tid[], run_ats timestamptz[])
    returns table (job_id bigint, status text)
    language plpgsql
    set search_path = pg_catalog, pg_temp
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
'release, of some locked jobs: released or cancelled for each.';

create or replace function pgqueue._fail(
    picks tid[], errors text[], delays interval[], permanents boolean[], moment timestamptz
)
    returns table (job_id bigint, status text)
    language plpgsql
    set search_path = pg_catalog, pg_temp
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
        -- Recording a failure never fails: whatever text came is kept, or its beginning.
        array_agg(coalesce(left(e.error, 8000), 'no error text')) as errors,
        array_agg(_fail.moment + coalesce(
            e.delay, pgqueue._retry_delay(j.attempt, settings.retry_base, settings.retry_cap)
        )) as retry_ats,
        array_agg(j.queue) as queues
    into failed
    from unnest(picks, errors, delays, permanents) as e (place, error, delay, permanent)
    join pgqueue.job as j on j.ctid = e.place
    cross join lateral pgqueue._settings(j.queue) as settings;

    perform pgqueue._end(
        coalesce(failed.picks, '{}'), failed.outcomes, failed.errors, failed.retry_ats, moment
    );
    -- Sleepers must hear of the new run_at.
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
'Ends the attempts of some locked jobs that went wrong; retry, dead or cancelled for each.';

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
    set jit = off
as $$
declare
    picks tid[];
begin
    perform pgqueue._check_delay('retry_in', retry_in);
    picks := pgqueue._held(array[job_id], array[token]);
    if picks = '{}' then
        perform pgqueue._lost(job_id, token);
    end if;
    return (
        select f.status
        from pgqueue._fail(
            picks, array[error], array[retry_in], array[permanent], clock_timestamp()
        ) as f
    );
end;
$$;

comment on function pgqueue.fail(bigint, bigint, text, interval, boolean) is
'Ends an attempt that went wrong. Returns retry (the job runs again after retry_in, or after the queue''s backoff: least(retry_cap, retry_base * 2^(attempt - 1)) times a random 0.5 to 1), dead (attempts used up, or permanent) or cancelled (an operator asked for it). Keeps the first 8000 characters of the error; its first line is its summary ("TimeoutError: ..."), by which it is found and logged. Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED, 22023 (bad argument).';

create or replace function pgqueue.release(
    job_ids bigint[],
    tokens bigint[],
    run_at timestamptz default null
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
begin
    if run_at not between '1970-01-01' and '9998-12-31' then
        perform pgqueue._refuse_run_at(run_at);
    end if;
    return query
    select r.job_id
    from pgqueue._release(
        pgqueue._held(job_ids, tokens),
        array_fill(release.run_at, array[coalesce(cardinality(job_ids), 0)])
    ) as r;
end;
$$;

comment on function pgqueue.release(bigint[], bigint[], timestamptz) is
'Gives jobs back unharmed: the attempt is not counted, and each keeps its place in its lane, or runs again at run_at (a snooze). One that was cancelled is gone. Returns the ids whose lease was held. Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

create or replace function pgqueue._to_results(texts text[], out results jsonb[], out problems text[])
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    -- Postgres cannot hold much more than this in one jsonb, and several of them not in one array.
    problems := array(
        select case when octet_length(t.result) > 64000000
            then format('the result has %s bytes of at most 64000000', octet_length(t.result))
        end
        from unnest(texts) with ordinality as t (result, place)
        order by t.place
    );
    begin
        results := array(
            select case when t.problem is null then t.result::jsonb end
            from unnest(texts, problems) with ordinality as t (result, problem, place)
            order by t.place
        );
    exception when data_exception or program_limit_exceeded then
        -- One by one, so that a bad one spoils no other.
        results := array_fill(null::jsonb, array[cardinality(texts)]);
        for place in 1 .. cardinality(texts) loop
            begin
                if problems[place] is null then
                    results[place] := texts[place]::jsonb;
                end if;
            exception when data_exception or program_limit_exceeded then
                problems[place] := 'the result cannot be stored: ' || sqlerrm;
            end;
        end loop;
    end;
end;
$$;

comment on function pgqueue._to_results(text[]) is
'Reads results in JSON, and says of each that Postgres cannot hold what is wrong with it.';

create or replace function pgqueue._check_finish(
    job_ids bigint[], outcomes text[], texts text[], delays interval[]
)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if cardinality(outcomes) is distinct from cardinality(job_ids)
        or cardinality(texts) <> cardinality(job_ids) or cardinality(delays) <> cardinality(job_ids)
    then
        perform pgqueue._refuse(
            'outcomes, texts and delays must be as long as job_ids',
            format(
                'There are %s ids, %s outcomes, %s texts and %s delays.',
                coalesce(cardinality(job_ids), 0), coalesce(cardinality(outcomes), 0),
                coalesce(cardinality(texts), 0), coalesce(cardinality(delays), 0)
            ),
            'Leave texts or delays out where there are none.'
        );
    end if;
    perform pgqueue._refuse(
        'every outcome must be complete, fail, reject or release',
        coalesce('One is "' || o.outcome || '".', 'One is null.'),
        'reject is for what no retry can mend.'
    )
    from unnest(outcomes) as o (outcome)
    where (o.outcome in ('complete', 'fail', 'reject', 'release')) is not true;
    perform pgqueue._check_delay('every delay', d.delay) from unnest(delays) as d (delay);
end;
$$;

comment on function pgqueue._check_finish(bigint[], text[], text[], interval[]) is
'Raises 22023 for what finish refuses.';

create or replace function pgqueue._finish(
    job_ids bigint[], tokens bigint[], outcomes text[], texts text[], delays interval[]
)
    returns table (job_id bigint, status text)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    moment timestamptz := clock_timestamp();
    picks tid[] := pgqueue._held(job_ids, tokens);
    results jsonb[];
    problems text[];
    given record;
begin
    select r.results, r.problems into results, problems
    from pgqueue._to_results(array(
        select case when e.outcome = 'complete' then e.said end
        from unnest(outcomes, texts) with ordinality as e (outcome, said, place)
        order by e.place
    )) as r;

    for given in
        select
            case when e.problem is null then e.outcome else 'fail' end as outcome,
            array_agg(h.id) as ids,
            array_agg(e.token) as tokens,
            array_agg(h.place) as picks,
            array_agg(coalesce(e.problem, e.said)) as texts,
            array_agg(e.delay) as delays,
            array_agg(e.result) as results
        from (
            select distinct on (u.id, u.token) u.*
            from unnest(job_ids, tokens, outcomes, texts, delays, results, problems) with ordinality
                as u (id, token, outcome, said, delay, result, problem, place)
            order by u.id, u.token, u.place
        ) as e
        join (
            select j.id, j.token, j.ctid as place from pgqueue.job as j where j.ctid = any (picks)
        ) as h on h.id = e.id and h.token = e.token
        group by 1
    loop
        if given.outcome = 'complete' then
            return query
            select c.id, 'completed'
            from pgqueue.complete_many(given.ids, given.tokens, given.results) as c (id);
        elsif given.outcome = 'release' then
            return query
            select r.* from pgqueue._release(
                given.picks, array(
                    select moment + d.delay
                    from unnest(given.delays) with ordinality as d (delay, place) order by d.place
                )
            ) as r;
        else
            return query
            select f.* from pgqueue._fail(
                given.picks, given.texts, given.delays,
                array_fill(given.outcome = 'reject', array[cardinality(given.ids)]), moment
            ) as f;
        end if;
    end loop;
end;
$$;

comment on function pgqueue._finish(bigint[], bigint[], text[], text[], interval[]) is
'finish, for those whose lease is held, in any order.';

create or replace function pgqueue.finish(
    job_ids bigint[],
    tokens bigint[],
    outcomes text[],
    texts text[] default null,
    delays interval[] default null
)
    returns table (job_id bigint, status text)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
declare
    ended bigint[];
    statuses text[];
begin
    perform pgqueue._check_leases(job_ids, tokens);
    perform pgqueue._check_finish(job_ids, outcomes, texts, delays);
    if 'complete' = all (outcomes) and coalesce(num_nonnulls(variadic texts), 0) = 0 then
        ended := array(select pgqueue.complete_many(finish.job_ids, finish.tokens));
        statuses := array_fill('completed'::text, array[cardinality(ended)]);
    else
        select array_agg(f.job_id), array_agg(f.status) into ended, statuses
        from pgqueue._finish(finish.job_ids, finish.tokens, outcomes, texts, delays) as f;
    end if;
    return query
    select g.id, case when g.nth = 1 then coalesce(e.status, 'lost') else 'lost' end
    from (
        select u.id, u.place, row_number() over (partition by u.id, u.token order by u.place) as nth
        from unnest(finish.job_ids, finish.tokens) with ordinality as u (id, token, place)
    ) as g
    left join unnest(ended, statuses) as e (id, status) on e.id = g.id
    order by g.place;
end;
$$;

comment on function pgqueue.finish(bigint[], bigint[], text[], text[], interval[]) is
'Ends many attempts in one call, each by its own outcome: complete (text: the result in JSON), fail (text: the error; delay: instead of the queue''s backoff), reject (an error that no retry can mend: dead at once) or release (given back uncounted; delay: not before then). Returns in the order of the input completed, retry, dead, cancelled, released or lost. A result that is no JSON, or above 64 MB, becomes a failed attempt of that job alone. Raises 25001 outside READ COMMITTED, 22023 (bad argument).';
