-- Caps of queues and kinds: how many of their jobs run at once (max_running), and how many begin in any
-- period (rate_limit). Those of groups are in module visit.
--
-- A claim under caps (_pick_capped) first checks how many permits are free, and passes over kinds that have none.
-- It picks jobs, takes their permits, and puts back the jobs that did not get all of theirs. Then it passes over
-- the kinds of those as well, and goes on until it has what it wants.

-- The caps of a queue that apply to some kinds (null: all), then those of the queue itself.
create or replace function pgqueue._caps_of(caps pgqueue._cap[], kinds text[])
    returns pgqueue._cap[]
    language plpgsql
    immutable
as $$
begin
    if kinds is null then
        return coalesce(caps, '{}');
    end if;
    return array(select row(c.*)::pgqueue._cap from unnest(caps) as c where c.kind = '' or c.kind = any (kinds));
end;
$$;

-- Creates the permits of a queue's caps for some kinds (null: all), if there are none and a setting of all queues
-- requires them.
create or replace function pgqueue._make_permits_for(queue text, caps pgqueue._cap[], kinds text[])
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    -- Permits for the queue's own caps were created when these were set.
    if exists (
        select
        from pgqueue.queue as q
        where q.name = '' and left(q.group_key, 1) = ''
            -- The first of these is the index's.
            and num_nonnulls(q.max_running, q.rate_limit, q.rate_period, q.weight, q.group_limit, q.group_on_retry) > 0
            and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
    ) then
        caps := pgqueue._caps_of(caps, kinds);
        perform pgqueue._make_permits(queue, caps, array(select c.most from unnest(caps) as c), 1);
    end if;
end;
$$;

-- What a claim passes over: what is paused, and these kinds, set to null, as well.
create or replace function pgqueue._without(paused jsonb, kinds text[])
    returns jsonb
    language plpgsql
    immutable
as $$
begin
    if kinds = '{}' then
        return paused;
    end if;
    return (
        select jsonb_object_agg(
            e.key, case when e.key = '*' then e.value
                else e.value || (select jsonb_object_agg(k.name, null) from unnest(kinds) as k (name))
            end
        )
        from jsonb_each(coalesce(paused, '{"": {"": false}}')) as e
    );
end;
$$;

-- Takes a permit of each of its caps for every picked job: job_of[i] has permits[i]. refused: jobs that could not get
-- all of theirs and so got none, and those behind them in groups with a limit; refusing: the caps that had too few.
create or replace function pgqueue._take_permits(
    queue text, picks tid[], limited bigint[], caps pgqueue._cap[], new_token bigint, moment timestamptz,
    age_after interval, out job_of bigint[], out permits tid[], out refused bigint[], out refusing pgqueue._cap[]
)
    language plpgsql
    set enable_hashjoin = on
    set enable_sort = on
as $$
declare
    -- Caps of kinds come first.
    are_of_queue boolean := (caps[1]).kind = '';
    picked text[];
    wanted int[];
    locked record;
    given record;
    cap pgqueue._cap;
    ids bigint[];
    free_ats timestamptz[];
begin
    if are_of_queue then
        wanted := array_fill(cardinality(picks), array[cardinality(caps)]);
    else
        picked := array(select j.kind from pgqueue.job as j where j.ctid = any (picks));
        wanted := array(
            select case when c.kind = '' then cardinality(picks) else cardinality(array_positions(picked, c.kind)) end
            from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
            order by c.nth
        );
    end if;
    locked := pgqueue._lock_free(queue, caps, wanted, moment);
    if are_of_queue and cardinality(locked.permits) = cardinality(caps) * cardinality(picks) then
        -- There are enough for all, and all jobs need the same.
        ids := array(select j.id from pgqueue.job as j where j.ctid = any (picks));
        foreach cap in array caps loop
            job_of := job_of || ids;
            free_ats := free_ats || array_fill(
                case when cap.is_rate then moment + cap.period end, array[cardinality(ids)]
            );
        end loop;
        permits := pgqueue._give_permits(locked.permits, job_of, new_token, moment, free_ats);
        refused := '{}';
        return;
    end if;
    with wants as (
        select
            j.id, c.nth as cap,
            row_number() over (
                partition by c.nth
                order by pgqueue._aged(j.priority, j.waits_since, moment, age_after) desc, j.waits_since, j.place, j.id
            ) as nth
        from (
            select
                j.id, j.kind, j.priority, case when o.is_ordered then max(j.run_at) over turn else j.run_at end as waits_since,
                case when o.is_ordered then row_number() over turn end as place
            from pgqueue.job as j
            cross join lateral (select j.id = any (limited) as is_ordered) as o
            where j.ctid = any (picks)
            -- In a group with a limit a job waits only since the last of those before it was due.
            window turn as (partition by j.group_key order by j.priority desc, j.run_at, j.id)
        ) as j
        join unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
            on c.kind in ('', j.kind) and wanted[c.nth] > 0
    ), has as (
        select l.cap, l.tid, row_number() over (partition by l.cap) as nth
        from unnest(locked.caps_of, locked.permits) as l (cap, tid)
    ), lacks as (
        select w.id, w.cap from wants as w left join has as h on h.cap = w.cap and h.nth = w.nth where h.tid is null
    ), passed as (
        select l.id from lacks as l
        union
        -- In a group with a limit no job may overtake another.
        select o.id
        from (
            select
                j.id,
                bool_or(exists (select from lacks as l where l.id = j.id))
                    over (partition by j.group_key order by j.priority desc, j.run_at, j.id) as is_behind
            from pgqueue.job as j
            where j.ctid = any (picks) and j.id = any (limited)
        ) as o
        where o.is_behind
    ), gets as (
        select w.id, w.cap, row_number() over (partition by w.cap order by w.nth) as nth
        from wants as w
        where not exists (select from passed as o where o.id = w.id)
    )
    select
        (select coalesce(array_agg(distinct o.id), '{}') from passed as o) as refused,
        (select array_agg(distinct l.cap) from lacks as l) as refusing,
        array_agg(g.id) as job_ids, array_agg(h.tid) as permits,
        array_agg(case when (caps[g.cap]).is_rate then moment + (caps[g.cap]).period end) as free_ats
    into given
    from gets as g
    join has as h on h.cap = g.cap and h.nth = g.nth;
    refused := given.refused;
    refusing := array(select caps[r.cap] from unnest(given.refusing) as r (cap));
    permits := pgqueue._give_permits(given.permits, given.job_ids, new_token, moment, given.free_ats);
    job_of := given.job_ids;
end;
$$;

-- Leaves picked jobs that did not get all their permits to the next claim, and gives back those of their groups.
create or replace function pgqueue._put_back(
    queue text, kinds text[], paused jsonb, job_ids bigint[], group_permits tid[]
)
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._return_position(queue, kinds, paused, l.priority, l.at)
    from (
        select j.priority, min(j.run_at) as at
        from pgqueue.job as j
        where j.id = any (job_ids) and j.group_key is null
        group by j.priority
    ) as l;
    -- Free since taken_at, this claim's moment, and not since now: the claim may look at them again, and goes by
    -- that moment.
    update pgqueue.permit as p
    set free_at = p.taken_at, job_id = null
    where p.ctid = any (group_permits) and p.job_id = any (job_ids) and not exists (
        -- Not a permit that the job has kept for this retry.
        select from pgqueue.job as j where j.id = p.job_id and j.permits is not null and not p.is_rate offset 0
    );
    -- Their groups come next.
    perform pgqueue._move_tickets(
        _put_back.queue, array_agg(j.group_key), array_agg(j.priority), clock_timestamp() - interval '1 minute'
    )
    from unnest(job_ids) as u (id)
    -- Not "id = any", which might read all jobs of groups.
    cross join lateral (select j.* from pgqueue.job as j where j.id = u.id offset 0) as j
    where j.group_key is not null
    having count(*) > 0;
end;
$$;

-- Checks whether caps that look full really are, and creates permits that they lack; returns whether any
-- permit was freed. Relies on the planner settings of _pick_capped.
create or replace function pgqueue._review_caps(
    queue text, caps pgqueue._cap[], full_caps int[], moment timestamptz, new_token bigint
)
    returns boolean
    language plpgsql
as $$
declare
    freed bigint := (
        select sum(case when c.is_rate then pgqueue._forget_future(queue, c.kind, array['']::text[], moment)
            else pgqueue._review_permits(queue, c.kind, array['']::text[], array[c.most], moment, new_token)
        end)
        from unnest(full_caps) as f (cap)
        cross join lateral (select (caps[f.cap]).*) as c
    );
begin
    if freed > 0 then
        return true;
    end if;
    -- For the next claim: this one may not take permits that it has created.
    perform pgqueue._make_permits(queue, array_agg(caps[f.cap]), array_agg((caps[f.cap]).most), 1000)
    from unnest(full_caps) as f (cap);
    return false;
end;
$$;

-- Lets _hold_off_claims last for 5 seconds from now on.
create or replace function pgqueue._go_on_holding_off()
    returns void
    language plpgsql
as $$
begin
    perform setval('pgqueue._cell_held_off', pgqueue._since_2020(clock_timestamp() + interval '5 seconds'));
end;
$$;

-- Until this transaction ends, but for at most 5 seconds after its last step, claims of a queue (null: of all) take
-- nothing: they would go by the old limits, and nobody would count what they take. Claims that have already begun get
-- 20 ms to lock their jobs, so that these are counted; slower ones take nothing.
create or replace function pgqueue._hold_off_claims(queue text)
    returns void
    language plpgsql
as $$
begin
    -- A claim that is just looking has the lock for a moment.
    for attempt in 1 .. 10 loop
        exit when pg_try_advisory_xact_lock(7366515, coalesce(hashtext(queue collate "default") & 255, 256));
        perform pg_sleep(0.001);
    end loop;
    -- Touch the rows: a claim checks the lock only if its queue's row is missing or locked by a change.
    update pgqueue.queue_in_force as f set queue = f.queue where f.queue = coalesce(_hold_off_claims.queue, f.queue);
    -- The cell comes last: a claim that began before it may go by the old limits: see _undo_if_overtaken.
    perform pgqueue._go_on_holding_off();
    perform pg_sleep(0.02);
end;
$$;

-- Whether another transaction holds off the claims of a queue.
create or replace function pgqueue._is_held_off(queue text, moment timestamptz)
    returns boolean
    language plpgsql
as $$
declare
    fold int := hashtext(queue collate "default") & 255;
begin
    if (pg_sequence_last_value('pgqueue._cell_held_off') > pgqueue._since_2020(moment)) is not true then
        return false;
    end if;
    return (
        pg_try_advisory_lock_shared(7366515, fold) and pg_advisory_unlock_shared(7366515, fold)
        and pg_try_advisory_lock_shared(7366515, 256) and pg_advisory_unlock_shared(7366515, 256)
    ) is not true;
end;
$$;

-- If a limit of a queue has been set, or is being set, since a claim began (at this moment, with these settings),
-- what it has locked may not have been counted: gives the jobs back, even if already leased under its token, and
-- their permits. Returns whether it has. Relies on the planner settings of claim.
create or replace function pgqueue._undo_if_overtaken(
    queue text, kinds text[], paused jsonb, settings pgqueue.queue_in_force, moment timestamptz, picks tid[], permits tid[],
    new_token bigint
)
    returns boolean
    language plpgsql
as $$
declare
    ids bigint[];
begin
    if (
        pg_sequence_last_value('pgqueue._cell_held_off') > pgqueue._since_2020(moment + interval '5 seconds')
    ) is not true then
        return false;
    -- About limits of single groups, these settings only say that there are some.
    elsif settings.has_groups is not true and not pgqueue._is_held_off(queue, moment) then
        -- A statement of its own, so that it sees a change that was committed just before the check above.
        if coalesce(settings, pgqueue._defaults()) is not distinct from pgqueue._in_force(queue) then
            return false;
        end if;
    end if;
    ids := array(select j.id from pgqueue.job as j where j.ctid = any (picks));
    update pgqueue.job as j
    set token = null, lease_expires_at = null
    where j.ctid = any (picks) and j.token = new_token;
    perform pgqueue._put_back(queue, kinds, paused, ids, permits);
    return true;
end;
$$;

-- After a change of limits or rates of groups: counts running jobs, and makes claims look again at groups
-- that could give no more jobs.
create or replace function pgqueue._apply_limits(queue text, group_key text)
    returns void
    language plpgsql
    -- So that a single group, or the groups of a queue, are found by an index.
    set plan_cache_mode = force_custom_plan
    set enable_indexscan = on
    set enable_seqscan = on
    set enable_hashagg = on
as $$
declare
    moment timestamptz := clock_timestamp();
    -- Only for all groups of a queue: a single one has an index of its own.
    whole_queue text := case when coalesce(group_key, '*') = '*' then queue end;
    known record;
    settings pgqueue.queue_in_force;
    cap pgqueue._cap;
begin
    for known in
        select distinct j.queue, j.group_key
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(coalesce(whole_queue, j.queue) collate "default")
            and (j.priority + 1000 * num_nonnulls(j.group_key)) > 500
            and (j.lease_expires_at is not null or j.xmax <> 0) and j.group_key is not null and pgqueue._is_in_group(
                j, coalesce(_apply_limits.queue, j.queue), coalesce(nullif(_apply_limits.group_key, '*'), j.group_key)
            )
        union
        select distinct p.queue, p.group_key
        from pgqueue.permit as p
        where p.group_key <> '' and p.free_at > moment and pgqueue._is_permit_of(
            p, coalesce(_apply_limits.queue, p.queue), '', coalesce(nullif(_apply_limits.group_key, '*'), p.group_key)
        )
    loop
        perform pgqueue._go_on_holding_off();
        settings := pgqueue._in_force(known.queue, '', known.group_key);
        foreach cap in array (pgqueue._group_caps(
            array[known.group_key], array[settings.group_limit], array[settings.rate_limit],
            array[settings.rate_period], null
        )).caps loop
            if not cap.is_rate then
                perform pgqueue._count_running(known.queue, cap);
            end if;
            perform pgqueue._fit_permits(known.queue, cap, moment);
        end loop;
    end loop;
    -- Otherwise the first claim would find no permits.
    for known in
        select g.queue, array_agg(g.group_key) as group_keys
        from (
            select t.queue, t.group_key, row_number() over () / 1000 as step
            from pgqueue.ticket as t
            where hashtext(t.queue) = hashtext(coalesce(whole_queue, t.queue) collate "default")
                and pgqueue._is_ticket_of(
                    t, coalesce(_apply_limits.queue, t.queue),
                    coalesce(nullif(_apply_limits.group_key, '*'), t.group_key)
                )
            group by t.queue, t.group_key
        ) as g
        group by g.queue, g.step
    loop
        perform pgqueue._go_on_holding_off();
        perform pgqueue._make_group_permits(known.queue, known.group_keys, pgqueue._in_force(known.queue));
    end loop;
    perform pgqueue._go_on_holding_off();
    perform pgqueue._unblock_groups(queue, group_key);
end;
$$;

-- After a change of the caps of a queue or kind, or of all queues: creates permits, counts running jobs, and
-- marks a surplus.
create or replace function pgqueue._apply_caps(queue text, kind text)
    returns void
    language plpgsql
    set enable_indexscan = on
    set enable_seqscan = on
    set enable_hashagg = on
as $$
declare
    moment timestamptz := clock_timestamp();
    known_queue text;
    cap pgqueue._cap;
begin
    for known_queue in
        select distinct j.queue from pgqueue.job as j where _apply_caps.queue is null
        union
        select distinct p.queue from pgqueue.permit as p where _apply_caps.queue is null and p.group_key = ''
        union
        -- A queue gets its permits before it has jobs.
        select _apply_caps.queue where _apply_caps.queue is not null
    loop
        perform pgqueue._go_on_holding_off();
        foreach cap in array pgqueue._caps_of((pgqueue._in_force(known_queue)).caps, array[kind]) loop
            continue when cap.kind <> coalesce(kind, '');
            if not cap.is_rate then
                perform pgqueue._count_running(known_queue, cap);
            end if;
            perform pgqueue._fit_permits(known_queue, cap, moment);
            perform pgqueue._make_permits(known_queue, array[cap], array[cap.most], 1000);
        end loop;
        perform pgqueue._wake(known_queue);
    end loop;
end;
$$;
