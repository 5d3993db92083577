-- Recurring jobs: a schedule has slots, by a cron expression or an interval, and each slot makes one job.
--
-- A slot is fired in one transaction: it locks the row of the schedule, enqueues the job, and advances the row to
-- the next slot. So each slot makes one job, whoever fires it, and if that transaction rolls back the
-- slot is still due. No slot comes back when the clock is set back, because the row never goes back.
--
-- Slots are fired by maintain(), by rest() before it returns how long to sleep, and by claims. In the middle of a
-- longer transaction a claim leaves a due slot to other sessions for a second, because nobody could see the job before
-- that transaction ends. A claim only has to read one cell, which says when the next schedule is due, but never more
-- than a second ahead: the session that writes it cannot see a schedule that has not been committed.

-- The first slot of a schedule after a moment; infinity after the year 9998.
create or replace function pgqueue._next_slot(schedule pgqueue.schedule, after timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
begin
    return case when schedule.every is null
        then coalesce(pgqueue._slot_after(pgqueue._read_cron(schedule.cron), schedule.timezone, after), 'infinity')
        -- The origin is a Monday, so that weeks begin on Mondays.
        else date_bin(schedule.every, after, '1970-01-05 00:00 UTC') + schedule.every
    end;
end;
$$;

-- By how much a schedule fires its slots later: always the same for the same name.
create or replace function pgqueue._share_of_jitter(name text, jitter interval)
    returns interval
    language sql
    immutable
as $$
    select coalesce(jitter, '0') * ((hashtext(name collate "default")::float8 + 2147483648) / 4294967296)
$$;

-- The slots of a due schedule, from next_slot on, that make a job according to catch_up: the last one (with skip
-- only if it is at most two minutes late), or all of them, at most 1000.
create or replace function pgqueue._slots_to_fire(schedule pgqueue.schedule, upto timestamptz)
    returns timestamptz[]
    language plpgsql
    stable
as $$
declare
    slots timestamptz[] := '{}'::timestamptz[];
    last timestamptz := schedule.next_slot;
    high timestamptz := upto;
    middle timestamptz := schedule.next_slot;
    slot timestamptz;
begin
    if schedule.catch_up = 'all' then
        while last <= upto and cardinality(slots) < 1000 loop
            slots := slots || last;
            last := pgqueue._next_slot(schedule, last);
        end loop;
        return slots;
    end if;
    -- By bisection: is there another slot, and is there one in the later half?
    while high - last >= interval '1 second' loop
        slot := pgqueue._next_slot(schedule, middle);
        if slot <= upto then
            last := slot;
        else
            high := middle;
        end if;
        middle := last + (high - last) / 2;
    end loop;
    return case when schedule.catch_up = 'one' or last >= upto - interval '2 minutes' then array[last] else slots end;
end;
$$;

-- Enqueues the job of a slot.
create or replace function pgqueue._enqueue_slot(schedule pgqueue.schedule, slot timestamptz)
    returns bigint
    language plpgsql
as $$
begin
    return pgqueue._enqueue_again(
        schedule.queue, schedule.payload, schedule.kind, schedule.priority, schedule.max_attempts,
        schedule.group_key, coalesce(schedule.headers, '{}') || jsonb_build_object(
            'schedule', schedule.name,
            'slot', to_char(slot at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
        )
    );
end;
$$;

-- Enqueues the jobs of a locked, due schedule, and advances it to its next slot. Returns how many. If
-- enqueue refuses (the payload is now too large), that is recorded as its problem.
create or replace function pgqueue._fire(schedule pgqueue.schedule, moment timestamptz)
    returns int
    language plpgsql
as $$
declare
    delay interval := pgqueue._share_of_jitter(schedule.name, schedule.jitter);
    slots timestamptz[];
    slot timestamptz;
    following timestamptz;
    job_id bigint := schedule.last_job_id;
begin
    slots := pgqueue._slots_to_fire(schedule, moment - delay);
    foreach slot in array slots loop
        job_id := pgqueue._enqueue_slot(schedule, slot);
    end loop;
    following := pgqueue._next_slot(schedule, greatest(schedule.next_slot, moment - delay));
    update pgqueue.schedule as s
    set next_slot = following,
        due_at = following + delay,
        last_slot = coalesce(slots[cardinality(slots)], s.last_slot),
        last_job_id = job_id,
        problem = null
    where s.name = schedule.name;
    return cardinality(slots);
-- A schedule that cannot be fired must block neither the others nor the claim.
exception when data_exception or program_limit_exceeded then
    update pgqueue.schedule as s
    set due_at = moment + interval '1 minute', problem = sqlerrm
    where s.name = schedule.name;
    return 0;
end;
$$;

-- Fires at most this many due schedules, the longest due first, and notes in the cell when to look
-- again. Returns how many jobs that made.
create or replace function pgqueue._fire_due(moment timestamptz, most int)
    returns int
    language plpgsql
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    since timestamptz;
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.schedule_due_idx'::regclass);
    picks pgqueue.schedule[];
    due pgqueue.schedule;
    fired int := 0;
    look_again_at timestamptz;
begin
    if pg_relation_size('pgqueue.schedule') = 0 then
        return 0;
    end if;
    since := pgqueue._begin_at('pgqueue.schedule_due_idx', moment);
    picks := array(
        select s
        from pgqueue.schedule as s
        where s.due_at between since and moment
        order by s.due_at
        limit most
        for update skip locked
    );
    -- Null if it picked fewer.
    perform pgqueue._looked(
        'pgqueue.schedule_due_idx', since, moment, walked, cardinality(picks), picks[most].due_at
    );
    look_again_at := pgqueue._believed_until(moment, '0');
    foreach due in array picks loop
        fired := fired + pgqueue._fire(due, moment);
        exit when fired >= 1000;
    end loop;
    perform setval('pgqueue._cell_due', pgqueue._since_2020(case
        when cardinality(picks) = most or fired >= 1000 then moment
        else greatest(look_again_at, least(
            moment + interval '1 second', (select min(s.due_at) from pgqueue.schedule as s where s.due_at > moment)
        ))
    end));
    return fired;
end;
$$;

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
    max_attempts int default null,
    headers jsonb default null,
    group_key text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        case
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
                'catch_up must be skip, one or all', format('It is "%s".', catch_up),
                'one, the default, makes one job for all missed slots.'
            ]
            when jitter < '0' or jitter > '1 day' then array[
                'jitter must be 0 to 1 day', format('It is %s.', jitter),
                'It spreads out the jobs of schedules that have the same slots.'
            ]
        end,
        pgqueue._check_job(queue, kind, priority, null, max_attempts, null, null, group_key, headers),
        pgqueue._check_access('scheduler', array[queue]),
        case when cron is not null then pgqueue._check_cron(cron collate "C") end,
        pgqueue._check_timezone(timezone),
        pgqueue._check_payload(payload, (pgqueue._in_force(queue, coalesce(kind, queue), group_key)).max_payload_bytes)
    ));
    moment timestamptz := clock_timestamp();
    caller text := pgqueue._caller();
    old pgqueue.schedule;
    given record;
    due record;
    is_locked boolean := false;
begin
    perform pgqueue._look_from_now_on();
    loop
        if is_locked then
            select s.* into old from pgqueue.schedule as s where s.name = schedule.name for update;
        else
            select s.* into old from pgqueue.schedule as s where s.name = schedule.name;
        end if;
        -- A schedule of a dropped role belongs to nobody.
        if exists (
            select from pg_roles as r where r.rolname = old.owner and not pg_has_role(caller::name, r.oid, 'usage')
        ) then
            refused := pgqueue._refuse(array[
                format('schedule "%s" belongs to role %I', name, old.owner),
                format('Role %I is not a member of it.', caller),
                format('Choose another name, or let an operator call unschedule(%L) first.', name),
                '42501'
            ]);
        end if;
        -- In a record, because pgspot complains about fields of other types.
        given := row(
            old.due_at, old.next_slot, old.last_slot, old.last_job_id,
            -- In seconds, not days: in the time zone of the caller a day may have 23 hours.
            make_interval(secs => extract(epoch from every)::float8),
            jitter, priority, max_attempts, coalesce(old.is_paused, false), name, queue, kind, group_key, cron,
            coalesce(timezone, 'UTC'), coalesce(catch_up, 'one'),
            coalesce((select r.rolname from pg_roles as r where r.rolname = old.owner), caller), old.problem,
            coalesce(payload, '{}'), headers
        )::pgqueue.schedule;
        if given is not distinct from old then
            return;
        elsif old.name is not null and not is_locked then
            -- Only now: an application that starts changes nothing, and may keep its transaction open beyond a slot.
            is_locked := true;
            continue;
        end if;
        if row(old.cron, old.every, old.timezone, old.jitter)
            is distinct from row(given.cron, given.every, given.timezone, given.jitter)
        then
            moment := clock_timestamp();
            -- Before a new rule applies, slots that are due under the old one are fired, without jitter.
            if not old.is_paused and old.next_slot <= moment and (old.last_slot < old.next_slot) is not false then
                due := given;
                due.cron := old.cron;
                due.every := old.every;
                due.jitter := null;
                -- One that waits for its jitter is not late.
                due.catch_up := case when due.catch_up = 'skip' and old.due_at > moment then 'one' else due.catch_up end;
                -- The new time zone if the server no longer knows the old one.
                foreach due.timezone in array array[old.timezone, given.timezone] loop
                    perform pgqueue._fire(due, moment);
                    exit when (select s.problem is null from pgqueue.schedule as s where s.name = old.name);
                end loop;
            end if;
            given.next_slot := pgqueue._next_slot(given, greatest(moment, given.last_slot));
        end if;
        given.problem := null;
        given.due_at := case when given.is_paused then 'infinity'
            else given.next_slot + pgqueue._share_of_jitter(given.name, given.jitter)
        end;
        insert into pgqueue.schedule as s values (given.*)
        on conflict on constraint schedule_pkey do update
        set due_at = given.due_at, next_slot = given.next_slot, problem = given.problem,
            every = given.every, jitter = given.jitter, priority = given.priority,
            max_attempts = given.max_attempts, queue = given.queue, kind = given.kind,
            group_key = given.group_key, cron = given.cron, timezone = given.timezone,
            catch_up = given.catch_up, owner = given.owner, payload = given.payload, headers = given.headers
        where old.name is not null;
        -- Otherwise another session has just created it: try again.
        exit when found or old.name is not null;
    end loop;
    perform setval('pgqueue._cell_due', pgqueue._since_2020(moment));
    perform pgqueue._wake(queue);
end;
$$;

comment on function pgqueue.schedule(
    text, text, text, interval, jsonb, text, int, text, text, interval, int, jsonb, text
) is
'Creates or changes the recurring job of this name: at each slot a job with
this queue, payload, kind, priority, max_attempts, group_key and headers (to
which the name, schedule, and the slot are added) is enqueued, once. Slots
are those of cron (see next_slots) in the time zone timezone, or come at the
interval every, 1 second to 3650 days, from Monday, 1970-01-05 00:00 UTC.
jitter, up to 1 day: later by a fraction of it, always the same for a name.
catch_up, for missed slots: one (default: one job, for the last of them), skip
(none if that is more than two minutes late) or all (the first 1000). Calling
it again changes only what differs, and fires no slot twice; a paused schedule
stays paused. If the rule or jitter changes, slots that have come under the old
one are enqueued first, with the new arguments. It belongs to the role that
created it; for others, unschedule frees the name.
Raises 22023 (bad argument), 54000 (payload too large), 42501 (it belongs to
another role, or the caller is a scheduler of other queues only).';

-- What is wrong with the name of a schedule that does not exist (PQ001).
create or replace function pgqueue._no_schedule(name text)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return array[
        format('schedule "%s" not found', name), 'No schedule has this name.',
        'select name from pgqueue.schedules lists existing schedules.',
        'PQ001'
    ];
end;
$$;

create or replace function pgqueue.unschedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean;
begin
    delete from pgqueue.schedule as s where s.name = unschedule.name;
    refused := pgqueue._refuse(case when not found then pgqueue._no_schedule(name) end);
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
as $$
declare
    refused boolean;
begin
    update pgqueue.schedule as s
    set is_paused = true, due_at = 'infinity'
    where s.name = pause_schedule.name;
    refused := pgqueue._refuse(case when not found then pgqueue._no_schedule(name) end);
end;
$$;

comment on function pgqueue.pause_schedule(text) is
'Stops a recurring job from enqueuing jobs until resume_schedule; its slots until
then, and any that nobody has enqueued yet, are not made up for.
Raises PQ001 (no such schedule).';

create or replace function pgqueue.resume_schedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    old pgqueue.schedule;
    refused boolean;
    moment timestamptz;
    slot timestamptz;
begin
    select s.* into old from pgqueue.schedule as s where s.name = resume_schedule.name for update;
    refused := pgqueue._refuse(case when not found then pgqueue._no_schedule(name) end);
    if old.is_paused then
        -- Read only now: this may have waited for a session that gave the schedule another rule.
        moment := clock_timestamp();
        -- Its next one may still wait for its jitter.
        slot := case
            when (old.last_slot < old.next_slot) is not false
                and old.next_slot + pgqueue._share_of_jitter(old.name, old.jitter) > moment
                then old.next_slot
            else pgqueue._next_slot(old, greatest(moment, old.last_slot))
        end;
        update pgqueue.schedule as s
        set is_paused = false, next_slot = slot, due_at = slot + pgqueue._share_of_jitter(s.name, s.jitter),
            problem = null
        where s.name = old.name;
        perform setval('pgqueue._cell_due', pgqueue._since_2020(moment));
        perform pgqueue._wake(old.queue);
    end if;
end;
$$;

comment on function pgqueue.resume_schedule(text) is
'Undoes pause_schedule, from the next slot on.
Raises PQ001 (no such schedule).';

create or replace function pgqueue.run_schedule(name text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    asked pgqueue.schedule;
    refused boolean;
begin
    select s.* into asked from pgqueue.schedule as s where s.name = run_schedule.name;
    refused := pgqueue._refuse(case when not found
        then pgqueue._no_schedule(name)
        else pgqueue._check_payload(
            asked.payload,
            (pgqueue._in_force(asked.queue, coalesce(asked.kind, asked.queue), asked.group_key)).max_payload_bytes
        )
    end);
    return pgqueue._enqueue_slot(asked, clock_timestamp());
end;
$$;

comment on function pgqueue.run_schedule(text) is
'Enqueues a job of a schedule at once, also while it is paused, and returns its
id: as at a slot, with this moment as the header slot. The slots stay as they
are.
Raises PQ001 (no such schedule), 54000 (its payload is too large by now).';
