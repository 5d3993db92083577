-- Groups: whose turn it is. What each group gives is in module visit.
--
-- A claim takes the due tickets, the earliest first, and each group gives as many jobs as its weight
-- says, or a multiple of that if there are fewer groups than jobs wanted. Its ticket then goes to the
-- end. If a group gave fewer, what it still has decides about its ticket. If it has nothing, the ticket is
-- deleted. If it has jobs for later, the ticket is set to that time. If it has due jobs that it cannot give,
-- because it is full, at its rate or paused, the ticket is blocked: the end of an attempt or a change
-- of settings makes it due, and otherwise a time-out does, after 100 ms at first, growing to 10 s.
--
-- While another session holds a ticket, its group is served without it: an open transaction holds up nobody.
--
-- A filtered claim (see pick) may have to pass over any number of groups. If it takes too long it stops, and
-- the next one continues there. Once the end has been reached, claims look only at tickets that have moved
-- since then and at new jobs, for 20 times as long as all that took, at most a minute (_leave_vain).

-- How long to leave alone a group that can give no more jobs, unless a hint says that it can: longer each
-- time, from 100 ms to 10 s.
create or replace function pgqueue._pause_of_group(served int, gave int)
    returns interval
    language sql
    immutable
as $$
    select least(
        interval '10 seconds',
        interval '100 milliseconds' * power(4, case when gave > 0 then 0 else least(greatest(-served, 0), 4) end)
    )
$$;

-- Sets when to look next at each group that a claim visited, as described above. has_enough: the claim got all
-- it wanted, perhaps before the last group had given its share. Relies on the planner settings of _pick_groups.
create or replace function pgqueue._settle_tickets(
    queue text, priority int, tickets tid[], group_keys text[], gives int[], limits int[], has_enough boolean,
    groups int[], run_ats timestamptz[], short int[], lacking int[], starts timestamptz[], start_until timestamptz,
    paused jsonb, is_filtered boolean, taken tid[], moment timestamptz
)
    returns void
    language plpgsql
as $$
declare
    -- Read once, so that the tickets keep their order.
    last timestamptz := clock_timestamp();
    -- Whether looking at a full group is expensive.
    is_slow boolean := coalesce(
        pg_sequence_last_value('pgqueue._cell_groups_slow') > pgqueue._since_2020(moment), false
    );
    rates int[] := case when short is not null
        then (pgqueue._group_settings(queue, group_keys, pgqueue._in_force(queue))).rates
    end;
begin
    if start_until is null and (limits is null or not is_slow)
        and gives[1] = all (gives) and cardinality(groups) = cardinality(tickets) * gives[1]
    then
        -- The usual case in deep queues: all gave their share, and go to the end.
        update pgqueue.ticket as t
        set at = last + g.nth * interval '1 microsecond', served = 0, is_blocked = false, is_full = false
        from unnest(tickets) with ordinality as g (tid, nth)
        where t.ctid = g.tid;
        return;
    end if;
    with verdict as (
        select
            g.*,
            case
                -- The claim had enough before this group had given its share.
                when g.is_cut and g.gave < g.give then 'same'
                when g.gave = g.give and (g.gave = g.most and is_slow) is not true then 'tail'
                when left_job.run_at is null then 'gone'
                when left_job.run_at > moment then 'later'
                when g.gave = g.most and is_slow then 'full'
                when g.is_lacking then 'tail'
                -- Not if its permit is kept for a due retry that only other claims may take.
                when g.is_short and not (is_filtered and exists (
                    select from pgqueue.permit as p
                    where pgqueue._is_permit_of(p, _settle_tickets.queue, '', g.key) and exists (
                        select from pgqueue.job as j
                        where j.id = p.job_id and pgqueue._is_kept(p, j, _settle_tickets.moment)
                        offset 0
                    )
                )) then 'blocked'
                -- Unless it is paused as a whole or needs order, the group may have other jobs that can run.
                when is_filtered or paused is not null and g.most is null and not pgqueue._is_group_paused(g.key, paused)
                    then 'same'
                else 'blocked'
            end as state,
            left_job.run_at as next_at,
            -- A rate that is used up tells when the next permit is free.
            case when g.is_short and g.rate is not null then (
                select case when count(distinct p.place) = g.rate then min(p.free_at) end
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, _settle_tickets.queue, '', g.key)
                    and p.is_rate and p.place <= g.rate and p.free_at > moment
            ) end as free_at,
            -- A retry that has kept its permit may run when it is due, and no hint says so.
            case when g.is_short and g.most is not null then (
                select min(k.run_at)
                from pgqueue.permit as p
                cross join lateral (
                    select j.run_at
                    from pgqueue.job as j
                    where j.id = p.job_id and pgqueue._is_kept(p, j, 'infinity') and j.run_at > moment
                    offset 0
                ) as k
                where pgqueue._is_permit_of(p, _settle_tickets.queue, '', g.key)
            ) end as retry_at
        from (
            select
                u.*, has_enough and u.nth = cardinality(tickets) as is_cut, coalesce(f.jobs, 0)::int as gave, f.last_at,
                coalesce(u.nth = any (short), false) as is_short, coalesce(u.nth = any (lacking), false) as is_lacking
            from unnest(tickets, group_keys, gives, limits, rates, starts) with ordinality
                as u (tid, key, give, most, rate, start, nth)
            left join (
                select f.of, count(*) as jobs, max(f.run_at) as last_at
                from unnest(groups, run_ats) as f (of, run_at)
                group by f.of
            ) as f on f.of = u.nth
        ) as g
        left join lateral (
            select j.run_at
            from pgqueue.job as j
            where pgqueue._is_in_group(j, _settle_tickets.queue, g.key)
                and -j.priority = -_settle_tickets.priority
                and j.run_at >= g.start and j.run_at < 'infinity'
                and j.lease_expires_at is null
                and (taken is null or j.ctid <> all (taken))
                and (g.gave < g.give or g.gave = g.most and is_slow)
            order by j.run_at, j.id
            limit 1
        ) as left_job on true
    ), gone as (
        delete from pgqueue.ticket as t
        where t.ctid = any (array(select v.tid from verdict as v where v.state = 'gone'))
    )
    update pgqueue.ticket as t
    set at = case v.state
            when 'same' then t.at
            when 'later' then v.next_at
            when 'full' then moment + interval '1 second' + v.nth * interval '1 microsecond'
            when 'blocked' then least(v.retry_at, greatest(
                moment + interval '10 milliseconds',
                coalesce(v.free_at, moment + pgqueue._pause_of_group(t.served, v.gave))
            ))
            else last + v.nth * interval '1 microsecond'
        end,
        served = case v.state
            when 'same' then greatest(t.served, 0) + v.gave
            when 'full' then -3
            when 'blocked' then case when v.free_at is not null then 0 when v.gave > 0 then -1 else least(t.served, 0) - 1 end
            else 0
        end,
        is_blocked = v.state in ('full', 'blocked'),
        is_full = v.state = 'full' or v.state = 'blocked' and v.is_short,
        start_at = case when _settle_tickets.start_until is not null then v.last_at else t.start_at end,
        start_until = coalesce(_settle_tickets.start_until, t.start_until)
    from verdict as v
    where t.ctid = v.tid and v.state <> 'gone' and (v.state <> 'same' or v.gave > 0);
end;
$$;

-- Locks the next due tickets of a lane, and deletes copies. If it gets fewer than most, others says how many
-- tickets other sessions have locked. If not may_hold, it returns those that they have locked instead.
-- Relies on the planner settings of _pick_groups.
create or replace function pgqueue._next_tickets(
    queue text, priority int, start timestamptz, upto timestamptz, most int, may_hold boolean, moment timestamptz,
    out tids tid[], out keys text[], out served int[], out starts timestamptz[], out ats timestamptz[], out others int
)
    language plpgsql
as $$
declare
    free tid[];
    copies tid[];
begin
    others := 0;
    if not may_hold then
        tids := array(
            select t.ctid
            from pgqueue.ticket as t
            where pgqueue._is_ticket_in(t, _next_tickets.queue, _next_tickets.priority) and t.at > start and t.at <= upto
            order by t.at
            limit most
        );
        free := array(select t.ctid from pgqueue.ticket as t where t.ctid = any (tids) for update skip locked);
        select
            array_agg(t.tid order by t.at), array_agg(t.group_key order by t.at), array_agg(0),
            array_agg('-infinity'::timestamptz), array_agg(t.at order by t.at)
        into tids, keys, served, starts, ats
        from (
            select distinct on (t.group_key) t.ctid as tid, t.group_key, t.at
            from pgqueue.ticket as t
            where t.ctid = any (tids) and t.ctid <> all (free)
            order by t.group_key, t.at
        ) as t;
        return;
    end if;
    select array_agg(l.tid), array_agg(l.group_key), array_agg(l.served), array_agg(l.start), array_agg(l.at)
    into tids, keys, served, starts, ats
    from (
        select
            t.ctid as tid, t.group_key, t.served, t.at, pgqueue._start_of(t, moment) as start
        from pgqueue.ticket as t
        where pgqueue._is_ticket_in(t, _next_tickets.queue, _next_tickets.priority) and t.at > start and t.at <= upto
        order by t.at
        limit most
        for update skip locked
    ) as l;
    if cardinality(keys) > 1 and cardinality(keys) > (select count(distinct u.key) from unnest(keys) as u (key)) then
        select
            array_agg(n.tid order by n.place) filter (where n.nth = 1),
            array_agg(n.key order by n.place) filter (where n.nth = 1),
            array_agg(n.served order by n.place) filter (where n.nth = 1),
            array_agg(n.start order by n.place) filter (where n.nth = 1),
            array_agg(n.at order by n.place) filter (where n.nth = 1),
            array_agg(n.tid) filter (where n.nth > 1)
        into tids, keys, served, starts, ats, copies
        from (
            select u.*, row_number() over (partition by u.key order by u.place) as nth
            from unnest(tids, keys, served, starts, ats) with ordinality as u (tid, key, served, start, at, place)
        ) as n;
        delete from pgqueue.ticket as t where t.ctid = any (copies);
    end if;
    if (cardinality(keys) < most) is not false then
        others := (
            select greatest(count(*) - coalesce(cardinality(keys), 0), 0)
            from (
                select
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _next_tickets.queue, _next_tickets.priority)
                    and t.at > start and t.at <= upto
                limit most
            ) as t
        );
    end if;
end;
$$;

-- _pick_groups in its usual case, in two or three statements: groups have no settings of their own, and the next
-- few give all that is wanted, with nothing expired; with a permit for each job if the queue sets a limit
-- (most). In any other case it returns no jobs, and _pick_groups has to do all of it.
create or replace function pgqueue._pick_plain_groups(
    queue text, kinds text[], lane int, wanted int, moment timestamptz, most int,
    out picks tid[], out new_token bigint, out job_of bigint[], out permits tid[]
)
    language plpgsql
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
declare
    key bigint := hashtextextended(concat(queue, kinds) collate "default", lane);
    now_us bigint := pgqueue._since_2020(moment);
    tag bigint := (key >> 20 & 4095) << 51;
    record int := (key & 15) * 2;
    valid_until bigint := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
    begin_at timestamptz := '-infinity'::timestamptz;
    batch int := greatest(least(wanted, 10), ceil(wanted::float8 / least(ceil(sqrt(wanted)), most)));
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass);
    walked_jobs bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass);
    tickets tid[];
    is_over boolean;
    is_enough boolean;
begin
    if (pg_sequence_last_value('pgqueue._cell_groups_due'::regclass) between now_us and now_us + 60000000) is not true then
        perform pgqueue._sweep_groups_if_due(moment, null);
    end if;
    if valid_until >> 51 > 0 then
        -- If the first record belongs to another lane, use the second.
        record := (key >> 4 & 15) * 2;
        valid_until := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
    end if;
    if valid_until between now_us and now_us + 60000000 then
        begin_at := timestamptz '2020-01-01 00:00 UTC'
            + interval '1 microsecond' * (pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass) >> 12);
        if pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass) & 4095 = 4095 then
            -- An earlier walk found nothing here: see _leave_vain.
            picks := '{}';
            return;
        end if;
    elsif valid_until between now_us - 1000000 and now_us then
        -- A walk from the beginning is due.
        picks := '{}';
        return;
    end if;
    if most is null then
        select array_agg(v.tid), array_agg(v.ticket), bool_or(v.is_over) into picks, tickets, is_over
        from (
            select h.tid, t.tid as ticket, h.is_over
            from (
                select t.ctid as tid, t.group_key, pgqueue._start_of(t, _pick_plain_groups.moment) as start
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _pick_plain_groups.queue, lane - 1000)
                    and t.at > begin_at and t.at <= _pick_plain_groups.moment
                order by t.at
                limit batch
                for update skip locked
            ) as t
            cross join lateral (
                select j.ctid as tid, num_nonnulls(j.lease_expires_at, (j.terms).expires_at) > 0 as is_over
                from pgqueue.job as j
                where pgqueue._is_in_group(j, _pick_plain_groups.queue, t.group_key)
                    and -j.priority = 1000 - lane
                    and j.run_at between t.start and _pick_plain_groups.moment
                    and (j.lease_expires_at <= _pick_plain_groups.moment) is not false
                    and (_pick_plain_groups.kinds is null or j.kind = any (_pick_plain_groups.kinds))
                order by j.run_at, j.id
                limit ceil(wanted::float8 / batch)
                for update skip locked
            ) as h
            limit wanted
        ) as v;
    elsif kinds is null and pg_sequence_last_value('pgqueue._cell_groups_slow') > now_us is not true
        and (pg_relation_size('pgqueue.permit_surplus_idx') <= 8192 or not pgqueue._any_surplus(queue))
    then
        select
            array_agg(v.tid), array_agg(v.ticket), bool_or(v.is_over), array_agg(v.id), array_agg(v.permit)
        into picks, tickets, is_over, job_of, permits
        from (
            select h.*, t.tid as ticket, u.permit
            from (
                select t.ctid as tid, t.group_key
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _pick_plain_groups.queue, lane - 1000)
                    and t.at > begin_at and t.at <= _pick_plain_groups.moment
                order by t.at
                limit batch
                for update skip locked
            ) as t
            -- In order, and a job that another session has locked is not replaced by the next. A job of a higher priority
            -- may be newer than the list of lanes.
            cross join lateral (
                select case
                    when most > 1 or not exists (
                        -- A call of _has_higher would add a fifth to the claim of a job.
                        select
                        from pgqueue.job as h
                        where pgqueue._is_in_group(h, _pick_plain_groups.queue, t.group_key)
                            and -h.priority < 1000 - lane
                            and pgqueue._is_ready(h, '-infinity', _pick_plain_groups.moment, true)
                        offset 0
                    )
                    then array(
                        select j.ctid
                        from pgqueue.job as j
                        where pgqueue._is_in_group(j, _pick_plain_groups.queue, t.group_key)
                            and -j.priority = 1000 - lane
                            and j.run_at <= _pick_plain_groups.moment
                            and (j.lease_expires_at <= _pick_plain_groups.moment) is not false
                        order by j.run_at, j.id
                        limit ceil(wanted::float8 / batch)
                    )
                    else '{}'::tid[]
                end as tids
                offset 0
            ) as c
            cross join lateral (
                select array(
                    select p.ctid
                    from pgqueue.permit as p
                    where pgqueue._is_permit_of(p, _pick_plain_groups.queue, '', t.group_key)
                        and pgqueue._is_free(p, false, most, _pick_plain_groups.moment)
                        and (p.taken_at is not null or not pgqueue._is_double(p))
                    order by p.free_at desc
                    limit cardinality(c.tids)
                    for update skip locked
                ) as tids
                offset 0
            ) as p
            cross join lateral unnest(c.tids[:cardinality(p.tids)], p.tids) as u (tid, permit)
            cross join lateral (
                select k.ctid as tid, k.id, num_nonnulls(k.lease_expires_at, (k.terms).expires_at) > 0 as is_over
                from pgqueue.job as k
                where k.ctid = u.tid and k.run_at <= _pick_plain_groups.moment
                    and (k.lease_expires_at <= _pick_plain_groups.moment) is not false
                for update skip locked
            ) as h
            limit wanted
        ) as v;
    end if;
    is_enough := cardinality(picks) = wanted and not is_over
        -- After a longer walk _pick_groups has to remember where to start.
        and pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass) - walked <= 200 + 3 * (batch + wanted)
        and pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass) - walked_jobs < 60 * batch + 3 * wanted;
    if is_enough and wanted > 1 then
        -- A group that has two tickets may come twice.
        is_enough := wanted = (select count(distinct u.tid) from unnest(picks) as u (tid));
    end if;
    if is_enough then
        update pgqueue.ticket as t
        set at = greatest(clock_timestamp(), _pick_plain_groups.moment) + array_position(tickets, t.ctid) * interval '1 microsecond',
            served = 0, is_blocked = false, is_full = false
        where t.ctid = any (tickets);
        if most is not null then
            new_token := nextval('pgqueue.token_seq');
            permits := pgqueue._give_permits(permits, job_of, new_token, moment);
        end if;
        return;
    end if;
    picks := '{}';
    job_of := null;
    permits := null;
end;
$$;

-- _sweep_permits and _sweep_groups every 50 ms, or as _swept_until says.
create or replace function pgqueue._sweep_groups_if_due(moment timestamptz, new_token bigint)
    returns void
    language plpgsql
as $$
declare
    now_us bigint := pgqueue._since_2020(moment);
begin
    -- It is due now, or so far ahead that it comes from another clock.
    if (pg_sequence_last_value('pgqueue._cell_groups_due'::regclass) between now_us and now_us + 60000000) is not true then
        perform setval('pgqueue._cell_groups_due', now_us + 50000);
        perform pgqueue._sweep_permits(new_token), pgqueue._sweep_groups();
        perform setval('pgqueue._cell_groups_due', pgqueue._swept_until(moment, '50 milliseconds'));
    end if;
end;
$$;

-- Sweeps the next 500 groups and 40 pages of permits, or fewer if that takes more than 20 ms from this
-- moment on; returns whether that was all there is. If not, the next such sweep, in whatever session, has to wait, so
-- that many idle workers sweep no more than one.
create or replace function pgqueue._sweep_all(moment timestamptz)
    returns boolean
    language plpgsql
as $$
declare
    now_us bigint := pgqueue._since_2020(moment);
    -- It continues where the last sweep stopped, up to the end, and then goes from the beginning to the end.
    ends int := 1 + coalesce(pg_sequence_last_value('pgqueue._cell_groups_swept') > -9223372036854775808, false)::int;
    pages int := pg_relation_size('pgqueue.permit') / current_setting('block_size')::int;
begin
    -- More than 50 ms ahead: the last sweep was a long one.
    if (ends = 2 or pages > 40)
        and pg_sequence_last_value('pgqueue._cell_groups_due') between now_us + 50001 and now_us + 60000000
    then
        return false;
    end if;
    for step in 1 .. 20 loop
        if pages > 0 then
            perform pgqueue._sweep_permits();
            pages := pages - 2;
        end if;
        if ends > 0 then
            ends := ends - ((pgqueue._sweep_some(25))[1] < 25)::int;
        end if;
        exit when ends = 0 and pages <= 0 or clock_timestamp() > moment + interval '20 milliseconds';
    end loop;
    if ends > 0 or pages > 0 then
        perform setval('pgqueue._cell_groups_due', pgqueue._swept_until(moment, '50 milliseconds'));
    end if;
    return ends = 0 and pages <= 0;
end;
$$;

-- _pick for the lanes of groups: locks at most the wanted number of due jobs, from the groups whose turn it is.
-- If they need permits, the job job_of[i] gets the permit permits[i]. It stops as soon as it has enough; stages:
--   new    groups with new jobs, if an earlier walk found nothing at the tickets before a position
--   ahead  tickets from the position on
--   all    all tickets, or those after the ones at which an earlier walk found nothing
--   guest  groups whose tickets other sessions have locked, without their tickets
--   more   groups that gave all that was asked of them, once more
--   last   groups found by the jobs that it may take: there may be few or none of these among many others
create or replace function pgqueue._pick_groups(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, is_whole boolean, is_top boolean,
    shared pgqueue.queue_in_force, taken tid[], inout new_token bigint, out picks tid[], out job_of bigint[], out permits tid[]
)
    language plpgsql
    set enable_bitmapscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    own_priority int := lane - 1000;
    key bigint := hashtextextended(concat(queue, kinds, paused) collate "default", lane);
    known record := pgqueue._position(key, moment);
    known_at timestamptz := timestamptz '2020-01-01 00:00 UTC' + (known.reached >> 12) * interval '1 microsecond';
    -- Whether a claim for other kinds, or when a cap is no longer full, may take what this one may not.
    is_filtered boolean := kinds is not null or paused is not null and new_token is not null;
    leaves_out boolean := num_nonnulls(kinds, paused) > 0;
    is_strict boolean := shared.group_limit = 1 and shared.has_groups is not true;
    believed record;
    -- Where to start: earlier walks found nothing before it.
    front timestamptz := '-infinity'::timestamptz;
    was_none boolean := false;
    new_since timestamptz;
    new_until timestamptz;
    is_none boolean := false;
    first_stage text := case when known.reached is null or is_whole then 'all' else 'ahead' end;
    stage text := first_stage;
    start timestamptz;
    upto timestamptz;
    -- Several jobs from each of a few groups are cheaper than one job from each of many.
    batch int := least(wanted, greatest(10, ceil(sqrt(wanted)), ceil(wanted::float8 / shared.group_limit)));
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass);
    walked_jobs bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass);
    looked int := 0;
    vain int := 0;
    passed_at timestamptz;
    are_locked boolean := false;
    are_taken boolean := false;
    may_give_more boolean := false;
    is_whole_walk boolean := known.reached is null;
    is_done boolean := false;
    is_cut boolean := false;
    is_long boolean := false;
    is_far boolean;
    met record;
    terms record;
    gives int[];
    starts timestamptz[];
    visit record;
    asked int;
    came int;
begin
    picks := '{}';
    perform pgqueue._sweep_groups_if_due(moment, new_token);
    -- Later than the tickets of this sweep, and than those of a first pick under caps, which have been moved.
    upto := clock_timestamp();
    if leaves_out and known.reached is not null then
        believed := pgqueue._believed(key, moment);
        if believed.until is not null then
            front := believed.since;
            new_since := believed.new_since;
            was_none := believed.is_none;
            stage := 'new';
        end if;
    end if;
    start := case when first_stage = 'ahead' then known_at else front end;
    while cardinality(picks) < wanted loop
        if stage in ('new', 'last') then
            met := pgqueue._groups_of_new(
                queue, kinds,
                -- This may meet more jobs than there are groups, so the pauses of all groups are read at once.
                case when stage = 'last' and paused ? '*' then paused - '*' || pgqueue._paused_groups(queue) else paused end, lane,
                case when stage = 'new' then new_since else '-infinity' end,
                case when stage = 'new' then known_at end, moment,
                num_nonnulls(nullif(shared.has_groups, false), shared.group_limit) > 0
            );
            new_until := case when stage = 'new' then met.upto else new_until end;
            is_none := not met.are_any and (stage = 'last' or was_none);
            is_done := is_done or is_none;
            is_cut := is_cut and not is_none;
            exit when is_none;
        else
            met := pgqueue._next_tickets(
                queue, own_priority, start,
                -- Whoever has just locked the ticket of a group that gives one job at a time is about to take that one.
                case when stage = 'guest' and is_strict then moment - interval '100 milliseconds' else upto end,
                batch, stage <> 'guest', moment
            );
            are_locked := are_locked or met.others > 0;
        end if;
        if met.keys is null and stage = 'new' then
            stage := first_stage;
            continue;
        elsif met.keys is null then
            if are_locked and picks <> '{}' then
                -- Groups that other sessions are serving get their share as well.
                are_locked := false;
                stage := 'guest';
                start := front;
            elsif may_give_more then
                may_give_more := false;
                stage := 'more';
                start := upto;
                upto := clock_timestamp() + interval '1 millisecond';
            else
                is_done := true;
                is_long := vain > 60
                    -- Groups that are paused as a whole cost nothing to pass over.
                    or pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass) - walked_jobs > 200;
                exit when picks <> '{}' or stage = 'guest' and not (leaves_out and is_long and front = '-infinity');
                if stage = 'ahead' then
                    began := clock_timestamp();
                    is_whole_walk := front = '-infinity';
                end if;
                stage := case stage when 'ahead' then 'all' when 'all' then 'guest' else 'last' end;
                start := front;
            end if;
            continue;
        end if;
        asked := wanted - cardinality(picks);
        terms := pgqueue._group_settings(queue, met.keys, shared);
        gives := pgqueue._gives(terms.weights, terms.limits, met.served, met.others, asked);
        starts := met.starts;
        if was_none and stage not in ('new', 'last') then
            -- Earlier walks found no job at all. Where no limit holds jobs up, only new ones can be there.
            starts := array(
                select case when num_nonnulls(g.most, g.rate) = 0 then greatest(g.start, new_since) else g.start end
                from unnest(met.starts, terms.limits, terms.rates) with ordinality as g (start, most, rate, nth)
                order by g.nth
            );
        end if;
        visit := pgqueue._serve_groups(
            queue, kinds, paused, lane, met.keys, gives, terms.limits, terms.rates, terms.periods, terms.may_keep,
            starts, asked, moment, nullif(taken || picks, '{}'), is_top, new_token
        );
        new_token := visit.new_token;
        picks := picks || coalesce(visit.picks, '{}');
        job_of := job_of || visit.job_of;
        permits := permits || visit.permits;
        -- Tickets of groups that the claim did not visit stay as they are.
        came := case when cardinality(picks) >= wanted then visit.groups[cardinality(visit.groups)]
            else cardinality(met.keys)
        end;
        if stage in ('new', 'last') then
            -- Move their tickets as if the groups had been served by them.
            perform pgqueue._move_tickets(queue, array_agg(s.key), array_agg(own_priority), clock_timestamp())
            from (select distinct met.keys[f.of] as key from unnest(visit.groups) as f (of)) as s
            having count(*) > 0;
            -- No limit holds their jobs up, so other sessions must have them locked.
            are_taken := picks = '{}' and num_nonnulls(terms.limits, terms.rates) = 0;
            exit when stage = 'last';
            stage := first_stage;
            continue;
        elsif stage <> 'guest' then
            if leaves_out and vain <= 60 and vain + came - coalesce(cardinality(visit.groups), 0) > 60 then
                -- Attempts may end in groups that this walk has already passed: ask to be told of them.
                perform pgqueue._ask_for_turns(clock_timestamp() + interval '2 seconds');
            end if;
            vain := vain + greatest(came - coalesce(cardinality(visit.groups), 0), 0);
            -- Not past the last group, which may have more to give.
            passed_at := coalesce(met.ats[came - (cardinality(picks) >= wanted)::int], passed_at);
            perform pgqueue._settle_tickets(
                queue, own_priority, met.tids[:came], met.keys[:came], gives, terms.limits,
                cardinality(picks) >= wanted, visit.groups, visit.run_ats, visit.short, visit.lacking, met.starts,
                case when not is_filtered and paused is null then visit.believed_until end,
                paused, is_filtered, nullif(taken || picks, '{}'), moment
            );
        end if;
        exit when cardinality(picks) >= wanted;
        looked := looked + cardinality(met.keys);
        if looked > 1000 and clock_timestamp() > moment + interval '100 milliseconds'
            or clock_timestamp() > moment + interval '500 milliseconds'
            -- Cancelled, it would undo what it did to the tickets, and the next claim would do it again.
            or clock_timestamp() > moment + nullif(current_setting('statement_timeout')::interval, '0') / 4
        then
            is_cut := stage <> 'guest';
            if is_cut and leaves_out then
                -- Before the last stage, in case the claim is cancelled there.
                perform pgqueue._leave_vain(
                    key, known.record, known.reached, least(passed_at, new_until, moment - interval '10 milliseconds'),
                    true, false, case when front = '-infinity' then moment end, true
                );
            end if;
            exit when picks <> '{}' or not leaves_out;
            -- Perhaps there are only a few jobs, or none.
            stage := 'last';
            continue;
        end if;
        start := met.ats[cardinality(met.ats)];
        may_give_more := may_give_more or visit.picks is not null;
        -- Enough groups to give the rest, if they are like these.
        batch := least(300, greatest(wanted - cardinality(picks), 20)
            * batch / greatest(coalesce(cardinality(visit.picks), 0), batch / 4, 1));
    end loop;
    is_far := vain > 60 or pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass) - walked
        > 200 + 3 * (looked + cardinality(picks));
    if leaves_out and is_done and not are_taken and (picks = '{}' or front > '-infinity') then
        perform pgqueue._leave_vain(
            key, known.record, known.reached, least(new_until, moment - interval '10 milliseconds'), false, is_none,
            case when front = '-infinity' then moment end, is_long or is_far
        );
    elsif are_taken or leaves_out and (is_cut or pgqueue._is_walked_again(known.record, known.reached)) then
        null;
    elsif is_far then
        -- Not before known_at, where the others continue: a walk from the beginning may not have come so far.
        perform pgqueue._leave_position(
            key, known.record, known.reached,
            pgqueue._since_2020(least(greatest(passed_at, known_at), moment - interval '10 milliseconds')), null,
            case when is_whole_walk
                then pgqueue._since_2020(pgqueue._believed_until(began, interval '100 milliseconds'))
            end
        );
    end if;
    if known.has_expired and picks <> '{}' and not (is_cut or is_far) then
        -- It found jobs near the beginning, so the others start there as well.
        perform pgqueue._leave_position(key, known.record, null, -1, null, null);
    end if;
end;
$$;
