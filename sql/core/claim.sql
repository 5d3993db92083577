-- Claims: which jobs a worker gets, under which lease. Module pick finds and locks them.
--
-- Running jobs stay in their lane, leased, so claim() finds expired leases where it looks for
-- work and ends those attempts itself: recovery needs no daemon.
--
-- Planner settings, here and in other modules: a session plans a statement once, with the statistics of that moment,
-- and a plan made while job is small would keep reading the whole table. Hence the settings on the functions: jobs are
-- found by ctid or by primary key, never by a scan, whatever the caller has switched off. JIT is off because a path
-- that is disabled but taken anyway looks expensive enough to compile, which takes longer than the rest of the call.
-- Some private functions rely on the settings of their callers, and say so. A subquery that ends in "offset 0" looks
-- up one row after the other: as a join it might read a whole table, or hash it.
--
-- claim, _pick, _pick_plain_groups and enqueue are longer than a screen because each further function call
-- in them costs 2 % of a claim (6 us of 240, measured over 20,000 claims of one job).

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
    used bigint := pg_sequence_last_value('pgqueue.used_seq'::regclass);
    settings pgqueue.queue_in_force;
    paused jsonb;
    moment timestamptz := clock_timestamp();
    noted int[];
    new_token bigint;
    picks tid[];
    of_lanes record;
    job_of bigint[];
    own_permits tid[];
    permits_of jsonb;
    has_leases boolean;
    is_capped boolean;
    has_one_each boolean;
    refused boolean;
begin
    -- Three shortcuts for the plain call: its arguments are checked in one expression, and
    -- settings and lanes are read only if there are any.
    if (
        octet_length(queue) between 1 and 200 and octet_length(worker) between 1 and 200
        and max_jobs between 1 and 10000 and lease is null
        and current_setting('transaction_isolation') = 'read committed'
        and current_setting('transaction_read_only') = 'off'
    ) is not true then
        refused := pgqueue._refuse(pgqueue._check_claim(queue, worker, max_jobs, lease));
        max_jobs := coalesce(max_jobs, 1);
    end if;
    if used <> 0 then
        -- It never is more than a second ahead, except of a clock that was set back; null after a restore.
        if used < 0 and (
            pg_sequence_last_value('pgqueue._cell_due'::regclass) - pgqueue._since_2020(moment) between 1 and 60000000
        ) is not true then
            moment := pgqueue._look_around_if_due(moment);
        end if;
        if used >> (hashtext(queue collate "default") & 255) % 63 & 1 = 1 then
            -- A row that another session is changing counts as missing; checking that is free. See _hold_off_claims.
            settings := (
                select f from pgqueue.queue_in_force as f where f.queue = claim.queue collate "default" and f.xmax = '0'
            );
            if settings.queue is null then
                if pgqueue._is_held_off(queue, moment) then
                    return;
                end if;
                settings := coalesce(
                    (select f from pgqueue.queue_in_force as f where f.queue = claim.queue collate "default"),
                    (select f from pgqueue.queue_in_force as f where f.queue = '')
                );
            end if;
            if settings.has_pauses or settings.has_access then
                if settings.has_access then
                    refused := pgqueue._refuse(pgqueue._check_access('worker', array[queue]));
                end if;
                paused := pgqueue._paused(queue, settings.paused);
                has_leases := lease is null and exists (
                    select from pgqueue.queue as q
                    where q.name in ('', claim.queue) and q.lease is not null and (q.kind <> '' or q.group_key <> '')
                );
            end if;
            if settings.paused and paused is null then
                return;
            end if;
            lease := coalesce(lease, settings.lease);
            is_capped := settings.caps is not null;
        end if;
    end if;

    if is_capped then
        new_token := nextval('pgqueue.token_seq');
        if cardinality(settings.caps) = 1 and (settings.caps[1]).kind = '' and max_jobs <= 300 then
            of_lanes := pgqueue._pick_under_cap(
                queue, kinds, paused, max_jobs, moment, settings, settings.caps[1], new_token
            );
            picks := of_lanes.picks;
            has_one_each := cardinality(of_lanes.permits) = cardinality(picks);
        end if;
        if picks is null then
            of_lanes := pgqueue._pick_capped(queue, kinds, paused, max_jobs, moment, settings, new_token);
            picks := of_lanes.picks;
        end if;
        if picks = '{}' then
            return;
        end if;
        job_of := of_lanes.job_of;
        own_permits := of_lanes.permits;
    elsif pg_sequence_last_value('pgqueue.lanes_seq'::regclass) >> (hashtext(queue collate "default") & 63) & 1 = 0 then
        picks := pgqueue._pick(queue, kinds, paused, 0, max_jobs, moment, false);
    else
        noted := pgqueue._noted_lanes(queue, moment);
        if noted[1] > 500 and num_nonnulls(paused, settings.age_after, nullif(settings.has_groups, false)) = 0
            and settings.group_on_retry is distinct from 'block'
            -- With a limit it visits tickets and permits one by one, too slow for more.
            and (settings.group_limit is null or max_jobs <= 300)
        then
            of_lanes := pgqueue._pick_plain_groups(queue, kinds, noted[1], max_jobs, moment, settings.group_limit);
            new_token := of_lanes.new_token;
            picks := of_lanes.picks;
            job_of := of_lanes.job_of;
            own_permits := of_lanes.permits;
            has_one_each := own_permits is not null;
        end if;
    end if;
    if (picks = '{}') is not false then
        of_lanes := pgqueue._pick_lanes(queue, kinds, paused, max_jobs, moment, noted, settings, new_token);
        new_token := of_lanes.new_token;
        picks := of_lanes.picks;
        if picks = '{}' then
            return;
        end if;
        job_of := of_lanes.job_of;
        own_permits := of_lanes.permits;
    end if;
    if current_setting('pgqueue.parked', true) <> '' then
        perform pgqueue._unpark_if_busy(moment);
    end if;

    -- A session that sets a limit waits 20 ms, then counts what claims have locked. A slower claim would
    -- not be counted, so it takes nothing.
    if clock_timestamp() > moment + interval '15 milliseconds' then
        if pgqueue._undo_if_overtaken(queue, kinds, paused, settings, moment, picks, own_permits, new_token) then
            return;
        end if;
    end if;
    -- With permits, keep the moment: the period of a rate began when its permit was taken.
    moment := case when new_token is not null then moment else clock_timestamp() end;
    new_token := coalesce(new_token, nextval('pgqueue.token_seq'));
    -- One job needs no sort, which would cost a tenth of the claim: it makes the heap outgrow
    -- what glibc keeps, so that each call gives memory back and asks for it again.
    if cardinality(picks) = 1 then
        return query
        update pgqueue.job as j
        set permits = own_permits,
            token = new_token,
            attempt = j.attempt + 1,
            worker = claim.worker,
            claimed_at = moment,
            lease_expires_at = moment + case when has_leases
                then (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease
                else coalesce(claim.lease, '30 seconds')
            end
        where j.ctid = any (picks)
        returning j.*;
        return;
    end if;
    if settings.age_after is null and (own_permits is null or has_one_each) then
        return query
        with leased as (
            update pgqueue.job as j
            set permits = case when has_one_each then array[own_permits[array_position(job_of, j.id)]] end,
                token = new_token,
                attempt = j.attempt + 1,
                worker = claim.worker,
                claimed_at = moment,
                lease_expires_at = moment + case when has_leases
                    then (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease
                    else coalesce(claim.lease, '30 seconds')
                end
            where j.ctid = any (picks)
            returning j.*
        )
        -- Sorted, so that the order does not depend on the plan.
        select l.* from leased as l order by l.priority desc, l.run_at, l.id;
        return;
    end if;
    -- Not a join, which might read all jobs.
    permits_of := (
        select jsonb_object_agg(h.id, h.permits::text)
        from (
            select u.id, array_agg(u.permit) as permits from unnest(job_of, own_permits) as u (id, permit) group by u.id
        ) as h
    );
    -- A statement of its own, because a sort by an expression copies each job twice.
    return query
    with leased as (
        update pgqueue.job as j
        set permits = (permits_of ->> j.id::text)::tid[],
            token = new_token,
            attempt = j.attempt + 1,
            worker = claim.worker,
            claimed_at = moment,
            lease_expires_at = moment + case when has_leases
                then (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease
                else coalesce(claim.lease, '30 seconds')
            end
        where j.ctid = any (picks)
        returning j.*
    )
    select l.*
    from leased as l
    order by
        case when settings.age_after is null then l.priority
            else pgqueue._aged(l.priority, l.run_at, moment, settings.age_after)
        end desc,
        l.run_at, l.id;
end;
$$;

comment on function pgqueue.claim(text, text, int, interval, text[]) is
'Takes at most max_jobs due jobs of a queue (only of these kinds, if given) and
returns them in the order in which to run them: highest priority, which rises
with the wait if age_after is set, then run_at, then id. Each counts one
attempt and is leased under its token until lease_expires_at. As a side effect
recovers expired leases. Never waits. A claim counts from its commit: one that
is rolled back, or cut off by a crash, never happened.
Raises 25001 outside READ COMMITTED, 25006 (the transaction is read-only, or
the server a standby), 22023 (bad argument), 42501 (the caller is a worker of
other queues only).';

-- How many of the wanted jobs each queue may give (share by weight, most by limit), in the order in which to
-- ask the queues.
create or replace function pgqueue._shares(queues text[], weights int[], limits int[], wanted int)
    returns table (queue text, most int, share int)
    language plpgsql
as $$
declare
    start float8 := random();
begin
    -- Rounded up or down at random, so that shares are right on average even if each is less than one job (systematic
    -- sampling, Madow 1949); the order is drawn by weight (Efraimidis and Spirakis 2006).
    return query
    select
        q.queue,
        least(q.most, wanted),
        (floor(q.upto + start) - floor(q.upto - q.part + start))::int
    from (
        select p.*, sum(p.part) over (order by p.place) as upto
        from (
            select
                u.*,
                wanted * coalesce(u.weight, 1)::float8 / sum(coalesce(u.weight, 1)) over () as part
            from unnest(queues, weights, limits) with ordinality as u (queue, weight, most, place)
        ) as p
    ) as q
    order by -ln(1 - random()) / coalesce(q.weight, 1);
end;
$$;

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
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_queues(queues),
        case
            when cardinality(weights) <> cardinality(queues) or cardinality(limits) <> cardinality(queues)
                then array[
                    'weights and limits must be as long as queues',
                    format(
                        'There are %s queues, %s weights and %s limits.', cardinality(queues),
                        coalesce(cardinality(weights), 0), coalesce(cardinality(limits), 0)
                    ),
                    'Omit them for equal shares without limits; a null in them is the default.'
                ]
            when 1 > any (weights) or 0 > any (limits) then array[
                'every weight must be at least 1, every limit at least 0',
                format('Weights are %s, limits %s.', weights, limits),
                'A queue with twice the weight gets twice the share.'
            ]
        end,
        pgqueue._check_claim(queues[1], worker, max_jobs, lease),
        -- It is one page as long as nobody's access is limited.
        case when pg_relation_size('pgqueue.access_queue_idx') > 8192 then pgqueue._check_access('worker', queues) end
    ));
    wanted int := coalesce(max_jobs, 1);
    turn record;
    share int;
    found_jobs int;
    rest_of text[] := '{}'::text[];
    rest_limits int[] := '{}'::int[];
begin
    if cardinality(queues) > 4 then
        -- A claim that finds nothing costs thirty times as much as this for each queue. First what a claim would do for
        -- the others.
        if pg_sequence_last_value('pgqueue.used_seq'::regclass) < 0 then
            perform pgqueue._look_around_if_due(clock_timestamp());
        end if;
        select array_agg(u.queue), array_agg(u.weight), array_agg(u.most)
        into queues, weights, limits
        from unnest(queues, weights, limits, pgqueue._may_have_jobs(queues)) as u (queue, weight, most, may_have_jobs)
        where u.may_have_jobs;
    end if;
    -- Two rounds: first each queue up to its share, then those that may have more.
    for turn in select s.* from pgqueue._shares(queues, weights, limits, wanted) as s loop
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
'claim over several queues in one call: at most max_jobs in all, shared by weight
(default 1 each), at most limits[i] of queues[i] (null: no limit). What a
queue leaves of its share goes to those that have more, so a full queue
starves no other and an empty one costs nothing. Returns the jobs queue by
queue, each in the order of claim: first the shares, then what others left.
Raises 25001 outside READ COMMITTED, 25006 (read-only), 22023 (bad argument),
42501 (the caller is a worker of other queues only).';
