-- Tickets: which groups have jobs to run.
--
-- Jobs of groups are in lanes of their own, which no claim walks. A group that has something to run at
-- some priority has a ticket, a small row that says when to look at the group next. A claim takes the due tickets,
-- the earliest first; each group gives a job and its ticket goes to the end. So groups are served
-- round-robin, however much waits in each, and an enqueue has nothing to compute.
--
-- Tickets are hints. An enqueue inserts one if it sees none, but changes none, so that an open
-- transaction holds up nobody; the end of an attempt makes the ticket of a full group due; nothing waits
-- for a lock. Two tickets of one group do no harm. The sweep goes from group to group, 50 every 50 ms, and
-- adds missing tickets, so nothing depends on a ticket that may get lost. For tests, the setting
-- pgqueue.lose_hints, a fraction from 0 to 1, loses hints at random.

-- Whether to lose this hint, for a test.
create or replace function pgqueue._is_lost()
    returns boolean
    language plpgsql
as $$
declare
    part text := current_setting('pgqueue.lose_hints', true);
begin
    return coalesce(part <> '' and random() < part::float8, false);
end;
$$;

-- Makes claims look at a group from this moment on, unless they do so anyway; returns whether it lacked a
-- ticket. in_order: whether a job must not overtake another.
create or replace function pgqueue._insert_ticket(
    queue text, group_key text, priority int, at timestamptz, in_order boolean
)
    returns boolean
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    moment timestamptz := greatest(at, clock_timestamp());
begin
    if at = 'infinity' then
        return false;
    end if;
    perform
    from pgqueue.ticket as t
    where pgqueue._is_ticket_of(t, _insert_ticket.queue, _insert_ticket.group_key)
        and t.priority + 0 = _insert_ticket.priority
        and (t.at <= moment or t.is_blocked)
        -- Not a locked ticket, which may be about to be deleted. Where xmax is xmin, its last change left that.
        and t.xmax in ('0'::xid, t.xmin)
    limit 1;
    if found then
        return false;
    elsif pgqueue._is_lost() then
        return true;
    end if;
    insert into pgqueue.ticket (at, start_at, start_until, priority, queue, group_key)
    -- start_at: without a ticket nothing waits before this job, unless a ticket was lost.
    values (
        moment, _insert_ticket.at,
        case when pg_sequence_last_value('pgqueue._cell_groups_slow') > pgqueue._since_2020(moment) and in_order is not true
            then moment + interval '1 second' end,
        _insert_ticket.priority, _insert_ticket.queue, _insert_ticket.group_key
    );
    perform pgqueue._list_lane(queue, 1000 + priority);
    return true;
end;
$$;

-- _insert_ticket for many groups; nulls among them are skipped.
create or replace function pgqueue._insert_tickets(
    queues text[], group_keys text[], priorities int[], ats timestamptz[], in_order boolean default true
)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
as $$
declare
    moment timestamptz := clock_timestamp();
    is_slow boolean := pg_sequence_last_value('pgqueue._cell_groups_slow') > pgqueue._since_2020(moment);
begin
    if pgqueue._is_lost() then
        return;
    end if;
    insert into pgqueue.ticket (at, start_at, start_until, priority, queue, group_key)
    -- A microsecond apart, so that a walk can stop and continue between any two.
    select
        n.at + (n.place - count(*) over ()) * interval '1 microsecond', n.first_at,
        case when is_slow and in_order is not true then n.at + interval '1 second' end,
        n.priority, n.queue, n.key
    from (
        select
            u.queue, u.key, u.priority, greatest(min(u.at), moment) as at,
            min(u.at) - interval '1 second' as first_at,
            row_number() over (order by min(u.place)) as place
        from unnest(queues, group_keys, priorities, ats) with ordinality as u (queue, key, priority, at, place)
        where u.key is not null and u.at < 'infinity'
        group by u.queue, u.key, u.priority
        offset 0
    ) as n
    where not exists (
        select
        from pgqueue.ticket as t
        where pgqueue._is_ticket_of(t, n.queue, n.key)
            and t.priority + 0 = n.priority
            and (t.at <= n.at or t.is_blocked) and t.xmax in ('0'::xid, t.xmin)
        offset 0
    )
    order by n.place;
end;
$$;

-- Moves the tickets of some groups of a queue, at these priorities, to another time. Inserts a ticket if there is
-- none or another session has it locked.
create or replace function pgqueue._move_tickets(queue text, group_keys text[], priorities int[], at timestamptz)
    returns void
    language plpgsql
as $$
begin
    update pgqueue.ticket as t
    set at = _move_tickets.at, served = 0, is_blocked = false, is_full = false
    where t.ctid = any (array(
        select t.tid
        from unnest(group_keys, priorities) as u (key, priority)
        cross join lateral (
            select t.ctid as tid
            from pgqueue.ticket as t
            where pgqueue._is_ticket_of(t, _move_tickets.queue, u.key) and t.priority + 0 = u.priority
            for update skip locked
        ) as t
    ));
    perform pgqueue._insert_tickets(
        array_fill(queue, array[cardinality(group_keys)]), group_keys, priorities,
        array_fill(at, array[cardinality(group_keys)])
    );
end;
$$;

-- For groups in which an attempt has ended: filtered claims may still think that their tickets lead to nothing. So
-- it adds a ticket, at each priority, if none of the group has moved for at_rest: perhaps the ended job was taken
-- without it. Relies on the planner settings of the callers of _wake_groups.
create or replace function pgqueue._return_turns(queues text[], group_keys text[], at_rest interval)
    returns void
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    passed text[];
begin
    if (pg_sequence_last_value('pgqueue._cell_groups_vain') > pgqueue._since_2020(moment)) is not true
        or pgqueue._is_lost()
    then
        return;
    end if;
    with passed as (
        insert into pgqueue.ticket (at, priority, queue, group_key)
        select moment, t.priority, u.queue, u.key
        from (
            select distinct u.queue, u.key from unnest(queues, group_keys) as u (queue, key) where u.key is not null
        ) as u
        cross join lateral (
            select t.priority
            from pgqueue.ticket as t
            where pgqueue._is_ticket_of(t, u.queue, u.key)
            group by t.priority
            having bool_or(not t.is_blocked) and max(t.at) < moment - at_rest
            offset 0
        ) as t
        returning ticket.queue
    )
    select array_agg(distinct p.queue) into passed from passed as p;
    perform pgqueue._wake(q.name) from unnest(passed) as q (name);
end;
$$;

-- For groups in which an attempt has ended: makes claims look at once at those that could give no more jobs, and
-- at those that filtered claims may have passed over. Nulls among them are skipped. Relies on the planner settings
-- of its callers.
create or replace function pgqueue._wake_groups(queues text[], group_keys text[])
    returns void
    language plpgsql
as $$
declare
    tickets tid[] := array(
        select t.tid
        from (select distinct u.queue, u.key from unnest(queues, group_keys) as u (queue, key) where u.key is not null) as u
        -- An array, because a join might read all tickets.
        cross join lateral unnest(array(
            select t.ctid from pgqueue.ticket as t where pgqueue._is_ticket_of(t, u.queue, u.key) and t.is_blocked
        )) as t (tid)
    );
    moment timestamptz;
    blocked record;
    locked tid[];
begin
    if pg_sequence_last_value('pgqueue._cell_groups_vain') > 0 then
        perform pgqueue._return_turns(queues, group_keys, '100 milliseconds');
    end if;
    -- Until this commits, claims may find the groups full.
    perform pgqueue._let_none_sleep(queues);
    if tickets = '{}' or pgqueue._is_lost() then
        return;
    end if;
    moment := clock_timestamp();
    select
        array_agg(t.ctid) as tids, array_agg(distinct t.queue) as queues,
        array_agg(t.priority) as priorities, array_agg(t.queue) as all_queues, array_agg(t.group_key) as keys
    into blocked
    from pgqueue.ticket as t
    where t.ctid = any (tickets) and t.is_blocked;
    locked := array(
        select t.ctid from pgqueue.ticket as t where t.ctid = any (tickets) and t.is_blocked
        for update skip locked
    );
    update pgqueue.ticket as t set at = moment, served = 0, is_blocked = false, is_full = false where t.ctid = any (locked);
    if cardinality(locked) < cardinality(blocked.tids) then
        -- Another session has these locked, and may see the group as it was before.
        insert into pgqueue.ticket (at, priority, queue, group_key)
        select moment, b.priority, b.queue, b.key
        from unnest(blocked.tids, blocked.priorities, blocked.all_queues, blocked.keys) as b (tid, priority, queue, key)
        where b.tid <> all (locked);
    end if;
    perform pgqueue._wake(q.name) from unnest(blocked.queues) as q (name);
end;
$$;

-- After a change of settings: makes claims look again at the groups (of all queues if queue is null) that
-- could give no more jobs, and at those that another session has locked, which may go by the old settings.
create or replace function pgqueue._unblock_groups(queue text, group_key text)
    returns void
    language plpgsql
    -- So that the tickets of a group or a queue are found by an index.
    set plan_cache_mode = force_custom_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    -- As in _apply_limits.
    whole_queue text := case when coalesce(group_key, '*') = '*' then queue end;
begin
    update pgqueue.ticket as t
    set at = clock_timestamp(), served = 0, is_blocked = false, is_full = false
    where t.ctid = any (array(
        select b.ctid
        from pgqueue.ticket as b
        where b.is_blocked and hashtext(b.queue) = hashtext(coalesce(whole_queue, b.queue) collate "default")
            and pgqueue._is_ticket_of(
                b, coalesce(_unblock_groups.queue, b.queue), coalesce(nullif(_unblock_groups.group_key, '*'), b.group_key)
            )
        for update skip locked
    ));
    -- Also those still blocked: they were locked above, but no longer are. One for each, however many copies there are.
    insert into pgqueue.ticket (at, priority, queue, group_key)
    select clock_timestamp(), l.*
    from (
        select distinct t.priority, t.queue, t.group_key
        from pgqueue.ticket as t
        where (t.is_blocked or t.xmax not in ('0'::xid, t.xmin))
            and hashtext(t.queue) = hashtext(coalesce(whole_queue, t.queue) collate "default") and pgqueue._is_ticket_of(
                t, coalesce(_unblock_groups.queue, t.queue), coalesce(nullif(_unblock_groups.group_key, '*'), t.group_key)
            )
        offset 0
    ) as l;
    -- Positions may no longer be right, so forget all of them.
    perform setval(format('pgqueue._cell_%s', n)::regclass, 0) from generate_series(0, 30, 2) as n;
end;
$$;

-- For jobs that come back to their place in a lane, or get another one in the middle of it: makes claims find
-- them at once, and wakes waiting workers.
create or replace function pgqueue._reopened(queues text[], priorities int[], group_keys text[], run_ats timestamptz[])
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
as $$
begin
    perform pgqueue._announce(o.queue, o.lane, o.run_at)
    from (
        select u.queue, u.priority + 1000 * num_nonnulls(u.key) as lane, min(u.run_at) as run_at
        from unnest(_reopened.queues, _reopened.priorities, _reopened.group_keys, _reopened.run_ats)
            as u (queue, priority, key, run_at)
        group by 1, 2
    ) as o;
    if num_nonnulls(variadic group_keys) > 0 then
        if pg_sequence_last_value('pgqueue._cell_groups_vain') > 0 then
            perform pgqueue._return_turns(queues, group_keys, '0');
        end if;
        perform pgqueue._wake_groups(queues, group_keys);
        perform pgqueue._insert_tickets(queues, group_keys, priorities, run_ats);
    end if;
    perform pgqueue._wake(o.queue)
    from (select distinct u.queue from unnest(_reopened.queues) as u (queue)) as o;
end;
$$;

-- The groups of a lane that have got a new job since then which this filtered claim may take, in the form of
-- _next_tickets. Their tickets do not show that, because a group may already have had one for its other jobs.
-- Leaves out groups with a ticket after passed. upto: how far it has looked. in_order: a job may wait for those
-- before it. Relies on the planner settings of its callers.
create or replace function pgqueue._groups_of_new(
    queue text, kinds text[], paused jsonb, lane int, since timestamptz, passed timestamptz, moment timestamptz,
    in_order boolean, out keys text[], out served int[], out starts timestamptz[], out ats timestamptz[], out others int,
    out upto timestamptz, out are_any boolean
)
    language plpgsql
as $$
begin
    others := 0;
    with new as materialized (
        select j.group_key as key, j.run_at as at
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, _groups_of_new.queue, lane) and j.run_at between since and moment
            and (j.lease_expires_at <= moment) is not false
            and pgqueue._is_wanted(j.kind, j.group_key, _groups_of_new.kinds, _groups_of_new.paused)
        order by j.run_at, j.id
        limit 200
    )
    select
        array_agg(g.key order by g.at), array_agg(0), array_agg(case when in_order then '-infinity' else g.at end order by g.at),
        array_agg(g.at order by g.at), (select case when count(*) = 200 then max(n.at) else moment end from new as n),
        exists (select from new)
    into keys, served, starts, ats, upto, are_any
    from (select n.key, min(n.at) as at from new as n group by n.key) as g
    where passed is null or not exists (
        select
        from pgqueue.ticket as t
        where pgqueue._is_ticket_of(t, _groups_of_new.queue, g.key) and t.priority + 0 = lane - 1000 and t.at > passed
        offset 0
    );
end;
$$;

-- Whether another claim has begun to walk a lane from the beginning since this position was read.
create or replace function pgqueue._is_walked_again(record int, known bigint)
    returns boolean
    language plpgsql
as $$
begin
    return coalesce(pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass) < known, false);
end;
$$;

-- Until then, the ends of attempts tell claims which groups to look at again: see _return_turns.
create or replace function pgqueue._ask_for_turns(until timestamptz)
    returns void
    language plpgsql
as $$
begin
    perform setval('pgqueue._cell_groups_vain', pgqueue._since_2020(until))
    where (pg_sequence_last_value('pgqueue._cell_groups_vain') > pgqueue._since_2020(until)) is not true;
end;
$$;

-- For a filtered claim that has found no job in a lane of groups, from the known position on (began null) or from
-- the beginning: after a long walk, lets the others rely on that. If it stopped before the end, lets them continue
-- from there, and counts how often in a row this happens: that says how long to leave the lane alone once they get
-- to the end.
create or replace function pgqueue._leave_vain(
    key bigint, record int, known bigint, reached timestamptz, is_cut boolean, is_none boolean, began timestamptz,
    is_long boolean
)
    returns void
    language plpgsql
as $$
declare
    cuts bigint := case when began is null then (known & 4095) % 4095 else 0 end;
    reached_us bigint := pgqueue._since_2020(reached);
    valid_until timestamptz;
begin
    if began is null and pgqueue._is_walked_again(record, known) then
        return;
    elsif is_cut then
        valid_until := clock_timestamp() + interval '59 seconds';
    elsif cuts > 0 then
        valid_until := clock_timestamp() + least(cuts * interval '2 seconds', interval '59 seconds');
    elsif began is not null and is_long then
        valid_until := pgqueue._believed_until(began, '100 milliseconds');
    elsif began is not null or reached_us - (known >> 12) < 1000000 then
        return;
    end if;
    perform pgqueue._leave_position(
        key, record, case when valid_until is null then known end, reached_us, null, pgqueue._since_2020(valid_until)
    );
    if valid_until > clock_timestamp() + interval '100 milliseconds' then
        perform pgqueue._ask_for_turns(valid_until);
    end if;
    if is_cut or is_none then
        perform setval(
            ('pgqueue._cell_' || record + 1)::regclass,
            reached_us << 12 | case when is_cut then least(cuts + 1, 4094) else 4095 end
        );
    end if;
end;
$$;

-- When a claim should look at a lane of groups again: at the next ticket, or when one of the first leases
-- expires; null for never. is_strict: the first job of a group holds up the others.
create or replace function pgqueue._until_ticket(
    queue text, kinds text[], paused jsonb, lane int, is_strict boolean, moment timestamptz
)
    returns timestamptz
    language plpgsql
    set enable_bitmapscan = off
as $$
declare
    is_limited boolean := is_strict or pg_relation_size('pgqueue.permit') > 0 and (pgqueue._in_force(queue)).has_groups;
    since timestamptz := '-infinity'::timestamptz;
    believed record;
    first_at timestamptz;
    until timestamptz;
    new_keys text[];
begin
    if num_nonnulls(kinds, paused) > 0 then
        believed := pgqueue._believed(hashtextextended(concat(queue, kinds, paused) collate "default", lane), moment);
        if believed.until is not null then
            since := believed.since;
            -- A random moment, so that one worker walks for the others; sooner if they have not come to the end.
            until := case when believed.cuts > 0 then moment + interval '2 seconds'
                else believed.until + random() * (believed.until - moment)
            end;
            new_keys := (pgqueue._groups_of_new(queue, kinds, paused, lane, believed.new_since, null, moment, true)).keys;
            if believed.is_none and new_keys is null then
                return until;
            end if;
        end if;
    end if;
    -- A due ticket that a claim has left in place is for jobs that it may not take.
    first_at := least(until, (
        -- Behind a job for others the next one may be free without notice: when that begins, or has expired. So it
        -- may while a retry for others has the permit.
        select min(greatest(t.at, j.run_at, case
            when is_strict and (j.nth > 1 or j.nth = 1 and exists (
                select
                from pgqueue.permit as p
                cross join lateral (select k.* from pgqueue.job as k where k.id = p.job_id offset 0) as k
                where pgqueue._is_permit_of(p, _until_ticket.queue, '', t.group_key)
                    and pgqueue._is_kept(p, k, moment)
                    and not pgqueue._is_wanted(k.kind, k.group_key, _until_ticket.kinds, _until_ticket.paused)
            )) then moment + interval '1 second'
        end))
        from (
            (
                select t.at, t.group_key
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _until_ticket.queue, lane - 1000) and t.at > since
                    -- The end of an attempt or of a pause makes this one due, unless it did not see it.
                    and (not t.is_blocked or t.served > -3)
                order by t.at
                limit case when num_nonnulls(kinds, paused) = 0 then 1 else 1000 end
            )
            union all
            select moment, n.key from unnest(new_keys) as n (key)
        ) as t
        left join lateral (
            select f.run_at, f.nth
            from (
                select j.run_at, j.kind, j.group_key, row_number() over (order by j.run_at, j.id) as nth
                from pgqueue.job as j
                where pgqueue._is_in_group(j, _until_ticket.queue, t.group_key)
                    and -j.priority = 1000 - lane
                    and j.run_at < 'infinity' and j.lease_expires_at is null and num_nonnulls(kinds, paused) > 0
                order by j.run_at, j.id
                -- Any further one is left to the next poll: each rest reads so many for each of up to 1000 tickets.
                limit case when is_strict then 5 end
            ) as f
            where pgqueue._is_wanted(f.kind, f.group_key, _until_ticket.kinds, _until_ticket.paused)
            limit 1
        ) as j on true
        where num_nonnulls(kinds, paused) = 0 or j.run_at is not null
    ), (
        select min(case
            -- One that began before there was a limit, whose end may make no ticket due: see _count_running.
            when is_limited and j.permits is null and j.lease_expires_at > moment then moment + interval '1 second'
            else j.lease_expires_at
        end)
        from (
            select j.lease_expires_at, j.permits
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, _until_ticket.queue, lane) and j.run_at <= moment
            order by j.run_at, j.id
            limit 1000
        ) as j
    ));
    return case when first_at is not null then greatest(first_at, moment + interval '50 milliseconds') end;
end;
$$;

-- The next groups, from this hash on, and the priorities at which they have any job: one index descent
-- for each priority.
create or replace function pgqueue._group_lanes(start bigint, most int)
    returns table (hash bigint, queue text, group_key text, priority int)
    language sql
    stable
as $$
    with recursive lane (hash, below, queue, group_key) as (
        values (start, -1000, null::text, null::text)
        union all
        select n.*
        from lane as l
        cross join lateral (
            select hashtextextended(j.group_key, hashtext(j.queue)), -j.priority, j.queue, j.group_key
            from pgqueue.job as j
            where j.group_key is not null
                and (hashtextextended(j.group_key, hashtext(j.queue)), -j.priority) > (l.hash, l.below)
            order by hashtextextended(j.group_key, hashtext(j.queue)), -j.priority, j.run_at, j.id
            limit 1
        ) as n
    )
    select l.hash, l.queue, l.group_key, -l.below from lane as l where l.group_key is not null limit most
$$;

-- Of tickets that may be copies, keeps the earliest for each group and priority, and recent ones while filtered
-- claims have asked for them (_ask_for_turns). If other sessions have all of them locked, inserts another. Relies
-- on the planner settings of _sweep_some.
create or replace function pgqueue._drop_copies(tickets tid[], moment timestamptz)
    returns void
    language plpgsql
as $$
declare
    are_asked_for boolean := coalesce(
        pg_sequence_last_value('pgqueue._cell_groups_vain') > pgqueue._since_2020(moment), false
    );
    locked tid[] := array(select t.ctid from pgqueue.ticket as t where t.ctid = any (tickets) for update skip locked);
begin
    insert into pgqueue.ticket (at, priority, queue, group_key)
    select moment, t.priority, t.queue, t.group_key
    from pgqueue.ticket as t
    left join unnest(locked) as l (tid) on l.tid = t.ctid
    where t.ctid = any (tickets)
    group by t.priority, t.queue, t.group_key
    having count(l.tid) = 0;
    delete from pgqueue.ticket as t
    where t.ctid = any (array(
        select c.tid
        from (
            select
                t.ctid as tid, t.at,
                row_number() over (partition by t.queue, t.group_key, t.priority order by t.at) as nth
            from pgqueue.ticket as t
            where t.ctid = any (locked)
        ) as c
        where c.nth > 1 and (c.at < moment - interval '5 seconds' or not are_asked_for)
    ));
end;
$$;

-- Sweeps at most this many groups, each at all its priorities, from where the last sweep stopped: gives a ticket
-- to groups that have jobs to run but no ticket, and deletes copies. Returns how many groups it looked at and how
-- many tickets it gave.
create or replace function pgqueue._sweep_some(most int)
    returns int[]
    language plpgsql
    set enable_sort = off
    set enable_bitmapscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    start bigint := coalesce(pg_sequence_last_value('pgqueue._cell_groups_swept'::regclass), -9223372036854775808);
    swept record;
begin
    select
        array_agg(l.hash) as hashes,
        array_agg(l.queue) filter (where t.is_missing) as queues,
        array_agg(l.group_key) filter (where t.is_missing) as keys,
        array_agg(l.priority) filter (where t.is_missing) as priorities,
        array_agg(f.at) filter (where t.is_missing) as ats,
        string_agg(t.tids, ' ') filter (where t.is_doubtful) as doubted
    into swept
    from pgqueue._group_lanes(start, most) as l
    left join lateral (
        select greatest(j.run_at, moment) as at
        from pgqueue.job as j
        where pgqueue._is_in_group(j, l.queue, l.group_key) and -j.priority = -l.priority
            and j.run_at < 'infinity' and (j.lease_expires_at is null or j.lease_expires_at <= moment)
        order by j.run_at, j.id
        limit 1
    ) as f on true
    cross join lateral (
        select
            f.at is not null and bool_or(t.at <= f.at or t.is_blocked and not exists (
                select
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, l.queue, '', l.group_key)
                    -- Or the clock was set back: see _forget_future.
                    and (p.free_at <= moment or p.is_rate and p.taken_at > moment + interval '1 second')
            )) is not true as is_missing,
            -- If it has been due for a second, another session may keep it locked.
            count(*) > 1 or min(t.at) < moment - interval '1 second' as is_doubtful,
            string_agg(t.ctid::text, ' ') as tids
        from pgqueue.ticket as t
        where f.at is not null and pgqueue._is_ticket_of(t, l.queue, l.group_key) and t.priority + 0 = l.priority
    ) as t;
    -- Next time start with the last group again: it may have seen only some of its priorities.
    if cardinality(swept.hashes) = most then
        perform setval('pgqueue._cell_groups_swept', swept.hashes[most]);
    elsif start > -9223372036854775808 then
        perform setval('pgqueue._cell_groups_swept', -9223372036854775808);
    end if;
    insert into pgqueue.ticket (at, priority, queue, group_key)
    select m.at, m.priority, m.queue, m.key
    from unnest(swept.queues, swept.keys, swept.priorities, swept.ats) as m (queue, key, priority, at);
    if swept.doubted is not null then
        perform pgqueue._drop_copies(string_to_array(swept.doubted, ' ')::tid[], moment);
    end if;
    return array[coalesce(cardinality(swept.hashes), 0), coalesce(cardinality(swept.queues), 0)];
end;
$$;

-- _sweep_some for at most this many groups, fewer if that takes long; returns how many tickets it gave.
create or replace function pgqueue._sweep_groups(most int default 50)
    returns int
    language plpgsql
as $$
declare
    walked bigint := pgqueue._group_tuples();
    swept int[];
    looked int := 0;
    given int := 0;
begin
    loop
        swept := pgqueue._sweep_some(25);
        looked := looked + swept[1];
        given := given + swept[2];
        -- Enough, or at the end, or in the midst of many finished jobs that an old snapshot keeps.
        exit when looked >= most or swept[1] < 25 or pgqueue._group_tuples() > walked + 5000 + 10 * most;
    end loop;
    return given;
end;
$$;

-- Deletes the tickets of groups that have no job at their priority, on sixteen pages from a random one on; returns
-- how many. A claim deletes those that it meets, but it meets none in a queue without jobs, and none that is not due.
-- Relies on the planner settings of maintain.
create or replace function pgqueue._drop_tickets()
    returns bigint
    language plpgsql
as $$
declare
    pages bigint := pg_relation_size('pgqueue.ticket') / current_setting('block_size')::int;
    -- Any page is as likely as any other, also the first and the last.
    first bigint := floor(random() * (pages + 15)) - 15;
    dropped bigint;
begin
    if pages <= 16 then
        first := 0;
    end if;
    delete from pgqueue.ticket as t
    where t.ctid = any (array(
        select e.ctid
        from pgqueue.ticket as e
        where e.ctid >= format('(%s,0)', greatest(first, 0))::tid and e.ctid < format('(%s,0)', first + 16)::tid
            and not exists (
                select from pgqueue.job as j
                where pgqueue._is_in_group(j, e.queue, e.group_key) and -j.priority = -e.priority
                offset 0
            )
        for update skip locked
    ));
    get diagnostics dropped = row_count;
    return dropped;
end;
$$;

-- How many index entries of groups this transaction has read.
create or replace function pgqueue._group_tuples()
    returns bigint
    language plpgsql
as $$
begin
    return pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass)
        + pg_stat_get_xact_tuples_returned('pgqueue.ticket_group_idx'::regclass);
end;
$$;
