-- Recurring jobs: a schedule has slots, by a cron text or an interval, and each slot makes one job.
--
-- A slot is fired in one transaction: the job is enqueued, and the row of the schedule, locked, goes on to
-- the next slot. So there is one job for it, whoever fires, and if that transaction rolls back the
-- slot is still due. No slot comes back when the clock does, because the row never goes back.
--
-- Who is awake fires: maintain(), rest() before it says how long to sleep, and a claim. In the midst of a
-- longer transaction a claim waits a second for others to do it, because nobody could see the job
-- before that transaction ends. What a claim pays is a look at one cell, which says when the next
-- schedule is due, but never more than a second ahead: whoever writes it cannot see a schedule that
-- has not been committed.

create or replace function pgqueue._check_schedule(
    name text, queue text, cron text, every interval, kind text, priority int,
    catch_up text, jitter interval, max_attempts int
)
    returns text[]
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return case
        when (octet_length(name) between 1 and 200) is not true then pgqueue._bad_name('name', name)
        when num_nonnulls(cron, every) <> 1 then array[
            'a schedule needs either cron or every',
            case when cron is null then 'Both are null.' else 'Both are given.' end,
            'Write cron => ''30 2 * * *'', or every => ''10 minutes''.'
        ]
        when every < '1 second' or every > '3650 days' or extract(year from every) <> 0
            or extract(month from every) <> 0
            then array[
                'every must be 1 second to 3650 days, in days and smaller units',
                format('It is %s.', every),
                'For months and years, whose lengths differ, use cron, such as @monthly.'
            ]
        when catch_up not in ('skip', 'one', 'all') then array[
            'catch_up must be skip, one or all',
            format('It is "%s".', catch_up),
            'one, the default, makes one job for all the slots that were missed.'
        ]
        when jitter < '0' or jitter > '1 day' then array[
            'jitter must be nothing to 1 day',
            format('It is %s.', jitter),
            'It spreads the jobs of schedules that have the same slots.'
        ]
        else pgqueue._check_job(queue, kind, priority, null, max_attempts, null, null, null, null)
    end;
end;
$$;

comment on function pgqueue._check_schedule(
    text, text, text, interval, text, int, text, interval, int
) is
'Refuses what schedule cannot take, but for its cron text and time zone.';

create or replace function pgqueue._next_slot(
    cron pgqueue._cron, every interval, timezone text, after timestamptz
)
    returns timestamptz
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return case when every is null
        then pgqueue._slot_after(cron, timezone, after)
        -- From a Monday on, so that weeks begin with it.
        else date_bin(every, after, '1970-01-05 00:00 UTC') + every
    end;
end;
$$;

comment on function pgqueue._next_slot(pgqueue._cron, interval, text, timestamptz) is
'The first slot of a rule after a moment; null after the year 9998.';

create or replace function pgqueue._last_slot(
    schedule pgqueue.schedule, cron pgqueue._cron, upto timestamptz
)
    returns timestamptz
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
declare
    slot timestamptz := schedule.next_slot;
    low float8 := date_part('epoch', slot);
    high float8 := date_part('epoch', upto);
    middle float8;
    other timestamptz;
begin
    -- By halves: is there another slot in the later one?
    while high - low >= 1 loop
        middle := (low + high) / 2;
        other := pgqueue._next_slot(cron, schedule.every, schedule.timezone, to_timestamp(middle));
        if other <= upto then
            slot := other;
            low := date_part('epoch', other);
        else
            high := middle;
        end if;
    end loop;
    return slot;
end;
$$;

comment on function pgqueue._last_slot(pgqueue.schedule, pgqueue._cron, timestamptz) is
'The last slot of a schedule up to a moment, from its next_slot on.';

create or replace function pgqueue._share_of_jitter(name text, jitter interval)
    returns interval
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return coalesce(jitter, '0') * ((hashtext(name)::float8 + 2147483648) / 4294967296);
end;
$$;

comment on function pgqueue._share_of_jitter(text, interval) is
'By how much a schedule fires its slots late: always the same, by its name.';

create or replace function pgqueue._slots_to_fire(
    schedule pgqueue.schedule, cron pgqueue._cron, following timestamptz, upto timestamptz
)
    returns timestamptz[]
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
declare
    slots timestamptz[] := array[schedule.next_slot];
    slot timestamptz := following;
begin
    if schedule.catch_up = 'all' then
        while slot <= upto and cardinality(slots) < 1000 loop
            slots := slots || slot;
            slot := pgqueue._next_slot(cron, schedule.every, schedule.timezone, slot);
        end loop;
    elsif slot <= upto then
        slots := array[pgqueue._last_slot(schedule, cron, upto)];
    end if;
    if schedule.catch_up = 'skip' and slots[1] < upto - interval '2 minutes' then
        return '{}'::timestamptz[];
    end if;
    return slots;
end;
$$;

comment on function pgqueue._slots_to_fire(
    pgqueue.schedule, pgqueue._cron, timestamptz, timestamptz
) is
'The slots of a schedule that is due, from next_slot and the one following it
on, for which to make a job, as catch_up says: the last one, unless (skip) it
is more than two minutes late; or all, at most 1000.';

create or replace function pgqueue._fire(schedule pgqueue.schedule, moment timestamptz)
    returns int
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    delay interval := pgqueue._share_of_jitter(schedule.name, schedule.jitter);
    cron pgqueue._cron := pgqueue._read_cron(schedule.cron);
    following timestamptz;
    slots timestamptz[];
    slot timestamptz;
    job_id bigint := schedule.last_job_id;
begin
    following := pgqueue._next_slot(cron, schedule.every, schedule.timezone, schedule.next_slot);
    slots := pgqueue._slots_to_fire(schedule, cron, following, moment - delay);
    foreach slot in array slots loop
        job_id := pgqueue.enqueue(
            schedule.queue, schedule.payload, schedule.kind, schedule.priority,
            max_attempts => schedule.max_attempts,
            headers => jsonb_build_object(
                'schedule', schedule.name,
                'slot', to_char(slot at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
            )
        );
    end loop;
    if following <= moment - delay then
        following := pgqueue._next_slot(cron, schedule.every, schedule.timezone, moment - delay);
    end if;
    update pgqueue.schedule as s
    set next_slot = coalesce(following, 'infinity'),
        due_at = coalesce(following + delay, 'infinity'),
        last_slot = coalesce(slots[cardinality(slots)], s.last_slot),
        last_job_id = job_id,
        problem = null
    where s.name = schedule.name;
    return cardinality(slots);
-- A schedule that cannot be fired must hold up neither the others nor the claim.
exception when data_exception or program_limit_exceeded then
    update pgqueue.schedule as s
    set due_at = moment + interval '1 minute', problem = sqlerrm
    where s.name = schedule.name;
    return 0;
end;
$$;

comment on function pgqueue._fire(pgqueue.schedule, timestamptz) is
'Enqueues the jobs of a schedule that is locked and due, and lets it go on to
its next slot. Returns how many. What enqueue refuses (the payload is too large
by now) is noted as its problem.';

create or replace function pgqueue._fire_due(moment timestamptz, most int)
    returns int
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    picks pgqueue.schedule[];
    due pgqueue.schedule;
    fired int := 0;
    look_again_at timestamptz;
begin
    if pg_relation_size('pgqueue.schedule') = 0 then
        return 0;
    end if;
    -- Others go on meanwhile.
    perform setval('pgqueue._cell_due', pgqueue._since_2020(moment + interval '1 second'));
    picks := array(
        select s
        from pgqueue.schedule as s
        where s.due_at <= moment
        order by s.due_at
        limit most
        for update skip locked
    );
    look_again_at := pgqueue._believed_until(moment, '0');
    foreach due in array picks loop
        fired := fired + pgqueue._fire(due, moment);
        exit when fired >= 1000;
    end loop;
    if cardinality(picks) = most or fired >= 1000 then
        look_again_at := moment;
    else
        look_again_at := greatest(look_again_at, least(
            moment + interval '1 second', (select min(s.due_at) from pgqueue.schedule as s where s.due_at > moment)
        ));
    end if;
    perform setval('pgqueue._cell_due', pgqueue._since_2020(look_again_at));
    return fired;
end;
$$;

comment on function pgqueue._fire_due(timestamptz, int) is
'Fires up to so many schedules that are due, the longest due first, and says in
the cell when to look again. Returns how many jobs that made.';

create or replace function pgqueue._look_around(moment timestamptz, most int)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    is_all boolean;
    is_used boolean := greatest(
        pg_relation_size('pgqueue.dependency'), pg_relation_size('pgqueue.batch')
    ) > 0;
begin
    -- rest() may be called in a read-only transaction, too.
    if current_setting('transaction_read_only') = 'on' then
        return;
    end if;
    perform pgqueue._fire_due(moment, most);
    if is_used then
        is_all := pgqueue._tie_loose_ends(10 * most, clock_timestamp()) < 10 * most;
        perform setval('pgqueue._cell_due', least(
            pgqueue._since_2020(pgqueue._believed_until(
                moment, case when is_all then interval '200 milliseconds' else interval '0' end
            )),
            case when pg_relation_size('pgqueue.schedule') > 0
                then pg_sequence_last_value('pgqueue._cell_due'::regclass)
            end
        ));
    elsif pg_relation_size('pgqueue.schedule') = 0 then
        perform setval('pgqueue._cell_due', pgqueue._since_2020(moment + interval '1 second'));
    end if;
end;
$$;

comment on function pgqueue._look_around(timestamptz, int) is
'Does what is due beside claims: so many schedules, and ten times as many loose
ends, or a part of the sweep. Says in the cell when to look again.';

create or replace function pgqueue._look_around_by_the_way(moment timestamptz)
    returns timestamptz
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    -- A statement that begins its transaction starts within the time of its planning.
    if pg_sequence_last_value('pgqueue._cell_due'::regclass) > pgqueue._since_2020(
        moment - case when statement_timestamp() > now() + interval '200 microseconds'
            then interval '1 second' else interval '0'
        end
    ) then
        return moment;
    end if;
    -- Few, or a claim that may not take long is cut off each time, and nothing is ever fired.
    perform pgqueue._look_around(moment, 10);
    return clock_timestamp();
end;
$$;

comment on function pgqueue._look_around_by_the_way(timestamptz) is
'_look_around for a claim, if it is time; returns the moment as of which to
claim, so that it gets what has become due.';

create or replace function pgqueue._until_slot(queues text[], moment timestamptz)
    returns interval
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
as $$
begin
    return least(pgqueue._until_loose_end(moment), (
        -- One that is due and was not fired is just being fired.
        select case when min(d.due_at) <= moment then interval '50 milliseconds' else min(d.due_at) - moment end
        from unnest(queues) as q (name)
        cross join lateral (
            select s.due_at
            from pgqueue.schedule as s
            where s.queue = q.name and s.due_at < 'infinity'
            order by s.due_at
            limit 1
        ) as d
    ));
end;
$$;

comment on function pgqueue._until_slot(text[], timestamptz) is
'How long until a schedule of one of these queues is due, or a loose end has to
be looked at; null for never.';

create or replace function pgqueue.schedule(
    name text,
    queue text,
    cron text default null,
    every interval default null,
    payload jsonb default '{}',
    kind text default null,
    priority int default null,
    timezone text default 'UTC',
    catch_up text default 'one',
    jitter interval default null,
    max_attempts int default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_schedule(
            schedule.name, schedule.queue, schedule.cron, schedule.every, schedule.kind,
            schedule.priority, schedule.catch_up, schedule.jitter, schedule.max_attempts
        ),
        case when schedule.cron is not null
            then coalesce(pgqueue._check_cron(schedule.cron), pgqueue._check_cron_comes(schedule.cron))
        end,
        pgqueue._check_timezone(schedule.timezone),
        pgqueue._check_payload(
            schedule.payload,
            (pgqueue._in_force(schedule.queue, coalesce(schedule.kind, schedule.queue))).max_payload_bytes
        )
    ));
    moment timestamptz := clock_timestamp();
    -- In hours: the clocks of the caller may give a day 23.
    hours interval := make_interval(secs => extract(epoch from schedule.every)::float8);
    zone text := coalesce(schedule.timezone, 'UTC');
    rule pgqueue._cron := pgqueue._read_cron(schedule.cron);
    delay interval := pgqueue._share_of_jitter(schedule.name, schedule.jitter);
    first_slot timestamptz := coalesce(
        pgqueue._next_slot(rule, hours, zone, moment), 'infinity'
    );
begin
    perform pgqueue._use('schedule');
    insert into pgqueue.schedule as s (
        due_at, next_slot, every, jitter, priority, max_attempts,
        name, queue, kind, cron, timezone, catch_up, payload
    )
    values (
        first_slot + delay, first_slot, hours, schedule.jitter, schedule.priority, schedule.max_attempts,
        schedule.name, schedule.queue, schedule.kind, schedule.cron, zone,
        coalesce(schedule.catch_up, 'one'), coalesce(schedule.payload, '{}')
    )
    on conflict (name) do update set
        -- A slot that has its job gets no other one.
        next_slot = case when row(s.cron, s.every, s.timezone)
                is not distinct from row(excluded.cron, excluded.every, excluded.timezone)
            then s.next_slot
            else coalesce(pgqueue._next_slot(
                rule, excluded.every, excluded.timezone, greatest(moment, s.last_slot)
            ), 'infinity')
        end,
        every = excluded.every, jitter = excluded.jitter, priority = excluded.priority,
        max_attempts = excluded.max_attempts, queue = excluded.queue, kind = excluded.kind,
        cron = excluded.cron, timezone = excluded.timezone, catch_up = excluded.catch_up,
        payload = excluded.payload, problem = null
    where row(
        s.every, s.jitter, s.priority, s.max_attempts, s.queue, s.kind, s.cron, s.timezone,
        s.catch_up, s.payload
    ) is distinct from row(
        excluded.every, excluded.jitter, excluded.priority, excluded.max_attempts, excluded.queue,
        excluded.kind, excluded.cron, excluded.timezone, excluded.catch_up, excluded.payload
    );
    update pgqueue.schedule as s
    set due_at = s.next_slot + delay
    where s.name = schedule.name and not s.is_paused and s.due_at <> s.next_slot + delay;
    perform setval('pgqueue._cell_due', pgqueue._since_2020(moment));
    perform pgqueue._wake(queue);
end;
$$;

comment on function pgqueue.schedule(
    text, text, text, interval, jsonb, text, int, text, text, interval, int
) is
'Makes, or changes, the recurring job of this name: at each slot a job with
this queue, payload, kind, priority and max_attempts is enqueued, once. Slots
are those of cron (see next_slots) by the clocks of timezone, or lie every so
far apart, 1 second to 3650 days, from Monday, 1970-01-05 00:00 UTC, on. jitter,
up to 1 day: later by a share of it that is always the same for a name.
catch_up, for slots that nobody could fire in time: skip (those that are more
than two minutes late), one (default: one job, for the last of them) or all
(the first 1000). Calling it again changes only what differs, and fires no
slot twice; one that is paused stays paused.
Raises 22023 (bad argument), 54000 (payload too large).';

create or replace function pgqueue._no_schedule(name text)
    returns text[]
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return array[
        format('schedule "%s" not found', name),
        'No schedule has this name.',
        'select name from pgqueue.schedules lists those that there are.',
        'PQ001'
    ];
end;
$$;

comment on function pgqueue._no_schedule(text) is
'What is wrong with the name of a schedule that nothing has (PQ001).';

create or replace function pgqueue.unschedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    refused boolean;
begin
    delete from pgqueue.schedule as s where s.name = unschedule.name;
    if not found then
        refused := pgqueue._refuse(pgqueue._no_schedule(name));
    end if;
end;
$$;

comment on function pgqueue.unschedule(text) is
'Ends a recurring job; the jobs that it has enqueued stay.
Raises PQ001 (no such schedule).';

create or replace function pgqueue.pause_schedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    refused boolean;
begin
    update pgqueue.schedule as s
    set is_paused = true, due_at = 'infinity'
    where s.name = pause_schedule.name;
    if not found then
        refused := pgqueue._refuse(pgqueue._no_schedule(name));
    end if;
end;
$$;

comment on function pgqueue.pause_schedule(text) is
'Lets a recurring job make no jobs until resume_schedule; its slots until then
are not made up for.
Raises PQ001 (no such schedule).';

create or replace function pgqueue.resume_schedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    queue text;
    refused boolean;
begin
    update pgqueue.schedule as s
    set is_paused = false,
        next_slot = r.slot,
        due_at = r.slot + pgqueue._share_of_jitter(s.name, s.jitter),
        problem = null
    from pgqueue.schedule as p
    cross join lateral (
        select coalesce(
            pgqueue._next_slot(pgqueue._read_cron(p.cron), p.every, p.timezone, greatest(moment, p.last_slot)),
            'infinity'
        ) as slot
        offset 0
    ) as r
    where s.name = resume_schedule.name and s.is_paused and p.name = s.name
    returning s.queue into queue;
    if found then
        perform setval('pgqueue._cell_due', pgqueue._since_2020(moment));
        perform pgqueue._wake(queue);
    elsif not exists (select from pgqueue.schedule as s where s.name = resume_schedule.name) then
        refused := pgqueue._refuse(pgqueue._no_schedule(name));
    end if;
end;
$$;

comment on function pgqueue.resume_schedule(text) is
'Undoes pause_schedule, from the next slot on.
Raises PQ001 (no such schedule).';
