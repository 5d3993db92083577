-- Rest: how long a worker that found nothing may sleep. Also the other work that claims and rests do as a side
-- effect, so that no daemon is needed. How sleepers are woken is in module wake.

-- When a lane without groups has something to claim: now, if it already has; null for never. A filtered claim looks
-- only from where the last long walk ended, and so does this; then it returns at the latest a random moment soon after
-- the next such walk is due, so that one worker walks for the others. Relies on the planner settings of _until_due.
create or replace function pgqueue._until_walked(queue text, kinds text[], paused jsonb, lane int, moment timestamptz)
    returns timestamptz
    language plpgsql
as $$
declare
    believed record;
    since timestamptz := '-infinity'::timestamptz;
    until timestamptz;
    ends_at timestamptz;
begin
    if num_nonnulls(kinds, paused) > 0 then
        believed := pgqueue._believed(hashtextextended(concat(queue, kinds, paused) collate "default", lane), moment);
        since := least(coalesce(believed.since, since), moment - interval '1 second');
        until := believed.until + random() * (believed.until - moment);
    end if;
    -- One pass over running and finished jobs, up to the first that is due.
    for ends_at in
        select coalesce(j.lease_expires_at, '-infinity')
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, _until_walked.queue, lane) and j.run_at between since and moment
            and pgqueue._is_wanted(j.kind, j.group_key, _until_walked.kinds, _until_walked.paused)
        order by j.run_at, j.id
    loop
        if ends_at <= moment then
            perform from pgqueue.job as j
            where pgqueue._is_in_lane(j, _until_walked.queue, lane) and j.run_at between since and moment
                and (j.lease_expires_at is null or j.lease_expires_at <= moment)
                and pgqueue._is_wanted(j.kind, j.group_key, _until_walked.kinds, _until_walked.paused)
            limit 1
            for update skip locked;
            -- If it is locked, look again in a second: if its claim rolls back, nothing tells us.
            return case when found then moment else least(until, moment + interval '1 second') end;
        end if;
        until := least(until, ends_at);
    end loop;
    return until;
end;
$$;

-- How long until a queue has something to claim: zero if it already has, else until a job is due or a lease
-- expires; null for never.
create or replace function pgqueue._until_due(queue text, kinds text[], paused jsonb, moment timestamptz)
    returns interval
    language plpgsql
    set enable_sort = off
as $$
declare
    live record;
    until timestamptz;
begin
    for live in select * from pgqueue._live_lanes(queue) loop
        if live.first <= moment and live.lane > 500 then
            until := least(until, pgqueue._until_ticket(
                queue, kinds, paused, live.lane, (pgqueue._in_force(queue)).group_limit is not null, moment
            ));
        elsif live.first <= moment then
            until := least(until, pgqueue._until_walked(queue, kinds, paused, live.lane, moment));
            if until <= moment then
                return interval '0';
            end if;
        end if;
        until := least(until, (
            -- If there are many that it may not take, it looks at the first 1000 only.
            select coalesce(min(f.run_at) filter (where f.is_wanted), case when count(*) = 1000 then max(f.run_at) end)
            from (
                select
                    j.run_at, pgqueue._is_wanted(j.kind, j.group_key, _until_due.kinds, _until_due.paused) as is_wanted
                from pgqueue.job as j
                where pgqueue._is_in_lane(j, _until_due.queue, live.lane)
                    and j.run_at > moment and j.run_at < 'infinity'
                    and j.lease_expires_at is null
                order by j.run_at, j.id
                limit case when num_nonnulls(kinds, paused) = 0 then 1 else 1000 end
            ) as f
        ));
    end loop;
    return until - moment;
end;
$$;

-- _until_due under the caps of a queue: also considers when a full cap has a free permit again. If what it finds may be
-- somebody else's just now, the next claim may find nothing either, so it waits a little.
create or replace function pgqueue._until_room(queue text, kinds text[], paused jsonb, moment timestamptz)
    returns interval
    language plpgsql
as $$
declare
    caps pgqueue._cap[] := (pgqueue._in_force(queue)).caps;
    room record;
    free record;
    taken text[];
    due interval;
    until interval;
begin
    if pgqueue._is_held_off(queue, moment) then
        return interval '20 milliseconds';
    elsif caps is null then
        return pgqueue._until_due(queue, kinds, paused, moment);
    end if;
    caps := pgqueue._caps_of(caps, kinds);
    room := pgqueue._room(queue, caps, 1, moment);
    if room.full_caps is not null then
        until := (
            -- The next claim creates permits that do not exist yet.
            select min(f.at) from (
                select case when count(*) < (caps[f.cap]).most then moment
                    else min(case
                        when p.is_held and p.free_at > moment then p.free_at
                        -- Its lease has expired, its job is gone, or one held beyond the cap is: the next claim finds
                        -- out, unless another session has locked the job.
                        when p.is_held or p.place <= (caps[f.cap]).most then moment + interval '100 milliseconds'
                    end)
                end as at
                from unnest(room.full_caps) as f (cap)
                left join lateral pgqueue._permits(queue, caps[f.cap], moment) as p
                    on not (caps[f.cap]).is_rate or p.place <= (caps[f.cap]).most
                group by f.cap
            ) as f
        ) - moment;
    end if;
    if (room.jobs = 0) is not true then
        due := pgqueue._until_due(queue, kinds, pgqueue._without(paused, room.full_kinds), moment);
        if due <= '0' and current_setting('transaction_read_only') = 'off' then
            begin
                free := pgqueue._lock_free(queue, caps, array_fill(1, array[cardinality(caps)]), moment);
                -- To release the locks.
                raise sqlstate 'PQ000';
            exception when sqlstate 'PQ000' then
                null;
            end;
            taken := array(
                select c.kind
                from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
                where c.nth <> all (coalesce(free.caps_of, '{}') || room.full_caps)
            );
            if taken <> '{}' then
                due := case when '' <> all (taken)
                    then pgqueue._until_due(queue, kinds, pgqueue._without(paused, room.full_kinds || taken), moment)
                end;
                due := case when due <= '0' then due else least(due, '100 milliseconds') end;
            end if;
        end if;
        until := least(until, due);
    end if;
    return case when until < '0' then '0' else until end;
end;
$$;

-- How long until a schedule of one of these queues, or a loose end, is due; null for never.
create or replace function pgqueue._until_slot(queues text[], moment timestamptz)
    returns interval
    language plpgsql
    set enable_sort = off
as $$
declare
    until interval;
    since timestamptz;
begin
    if pg_relation_size('pgqueue.loose_end') > 0 then
        since := pgqueue._begin_at('pgqueue.loose_end_look_idx', moment);
        until := (
            select min(first.look_at) - moment
            from (values (false), (true)) as n (is_new)
            cross join lateral (
                select l.look_at
                from pgqueue.loose_end as l
                where (l.what = 'new') = n.is_new and l.look_at >= since
                order by l.look_at
                limit 1
            ) as first
        );
        if until <= '0' and current_setting('transaction_read_only') = 'off' then
            -- If it is locked, another session is looking at it.
            perform
            from (values (false), (true)) as n (is_new)
            cross join lateral (
                select
                from pgqueue.loose_end as l
                where (l.what = 'new') = n.is_new and l.look_at between since and moment
                order by l.look_at
                limit 1
                for update skip locked
            ) as l
            limit 1;
            if found then
                return interval '0';
            end if;
        end if;
        until := case when until is not null then greatest(until, '200 milliseconds') end;
    end if;
    return least(until, (
        -- If a due one was not fired, another session is firing it.
        select case when min(d.due_at) <= moment then interval '50 milliseconds' else min(d.due_at) - moment end
        from (select pgqueue._begin_at('pgqueue.schedule_due_idx', moment) as at where pg_relation_size('pgqueue.schedule') > 0) as b
        cross join unnest(queues) as q (name)
        cross join lateral (
            select s.due_at
            from pgqueue.schedule as s
            where s.queue = q.name and s.due_at >= b.at and s.due_at < 'infinity'
            order by s.due_at
            limit 1
        ) as d
    ));
end;
$$;

-- Does the due work besides claims: fires at most this many schedules and handles ten times as many loose ends, or
-- a part of the sweep. Notes in the cell when to look again.
create or replace function pgqueue._look_around(moment timestamptz, most int)
    returns void
    language plpgsql
as $$
declare
    is_all boolean;
    is_used boolean := greatest(
        pg_relation_size('pgqueue.dependency'), pg_relation_size('pgqueue.batch'), pg_relation_size('pgqueue.loose_end')
    ) > 0;
begin
    -- rest() may be called in a read-only transaction.
    if current_setting('transaction_read_only') = 'on' then
        return;
    end if;
    -- Meanwhile other sessions need not look.
    perform setval('pgqueue._cell_due', pgqueue._since_2020(moment + interval '1 second'));
    if is_used then
        is_all := pgqueue._tie_loose_ends(10 * most, clock_timestamp()) < 10 * most;
    end if;
    perform pgqueue._fire_due(moment, most);
    if is_used then
        perform setval('pgqueue._cell_due', case
            when is_all then least(
                pgqueue._swept_until(moment, '200 milliseconds'), pg_sequence_last_value('pgqueue._cell_due'::regclass)
            )
            else pgqueue._since_2020(moment)
        end);
    end if;
end;
$$;

-- _look_around for a claim, if it is time; returns the moment as of which to claim, so that the claim
-- finds the jobs that this has made due.
create or replace function pgqueue._look_around_if_due(moment timestamptz)
    returns timestamptz
    language plpgsql
as $$
begin
    -- Only a claim that begins its transaction looks at once; another waits up to a second. The first statement
    -- starts as soon as it is planned, so its time is close to that of the transaction.
    if pg_sequence_last_value('pgqueue._cell_due'::regclass) - pgqueue._since_2020(
        moment - case when statement_timestamp() > now() + interval '200 microseconds'
            then interval '1 second' else interval '0'
        end
    ) between 1 and 60000000 then
        return moment;
    end if;
    -- Few: a claim with a short statement_timeout would be cancelled each time, and nothing ever fired.
    perform pgqueue._look_around(moment, 10);
    return clock_timestamp();
end;
$$;

create or replace function pgqueue.rest(queues text[], kinds text[] default null, park boolean default true)
    returns interval
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_queues(queues), pgqueue._check_isolation(), pgqueue._check_access('worker', queues)
    ));
    moment timestamptz := clock_timestamp();
    is_swept boolean := true;
    is_quiet boolean := true;
    may_have_jobs boolean[];
    pause interval;
begin
    perform pgqueue._look_around(moment, 100);
    perform pgqueue._serve(queues, kinds, park is false);
    if park is not false then
        is_quiet := pgqueue._park(queues);
    end if;
    moment := clock_timestamp();
    may_have_jobs := pgqueue._may_have_jobs(queues);
    -- This worker may be the only one, and its claim has swept only a few of the groups that lost their tickets.
    if pg_sequence_last_value('pgqueue.lanes_seq'::regclass) <> 0
        and current_setting('transaction_read_only') = 'off' and exists (
            select
            from unnest(queues, may_have_jobs) as q (name, may_have_jobs)
            cross join lateral pgqueue._live_lanes(q.name) as l
            where q.may_have_jobs and l.lane > 500 and l.first <= moment
        )
    then
        is_swept := pgqueue._sweep_all(moment);
        moment := clock_timestamp();
    end if;
    select min(least(
        case when q.may_have_jobs then pgqueue._until_room(q.name, rest.kinds, p.paused, moment) end,
        case when not s.notify then interval '5 seconds' end
    ))
    into pause
    from unnest(queues, may_have_jobs) as q (name, may_have_jobs)
    cross join lateral pgqueue._in_force(q.name) as s
    cross join lateral (
        select case when s.has_pauses then pgqueue._paused(q.name, s.paused) end as paused offset 0
    ) as p
    where not s.paused or p.paused is not null;
    pause := least(pause, pgqueue._until_slot(queues, moment), case when not is_swept then interval '1 second' end);
    if not is_quiet then
        -- Sleep at least 40 times as long as this look took: with a claim each time, that is a twentieth.
        pause := least(pause, interval '5 seconds', greatest(
            interval '20 milliseconds', 40 * (clock_timestamp() - moment)
        ));
    end if;
    return pause;
-- An interrupted rest() leaves the session unparked.
exception when query_canceled or lock_not_available or deadlock_detected
    or insufficient_resources or program_limit_exceeded or read_only_sql_transaction
then
    perform pgqueue._unpark();
    raise;
end;
$$;

comment on function pgqueue.rest(text[], text[], boolean) is
'For a session that has run LISTEN pgqueue and whose claim found nothing in
these queues (of these kinds): returns how long it may sleep, unless a
notification comes first. Zero: claim again at once. Null: until notified.
Fires due schedules. From now on enqueues of other sessions into these queues
notify it; 100 ms of work without a rest end that. NOTIFY is a hint, so look
every few seconds anyway.
Behind a transaction pooler none arrive: use park => false, which only looks.
Also notes, for health and why, that this session serves these queues and kinds:
while it lives, or for ten minutes with park => false.
Raises 25001 outside READ COMMITTED, 22023 (bad argument), 42501 (the caller is
a worker of other queues only).';
