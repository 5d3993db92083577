-- What claims remember for each other, and which lanes of a queue have jobs to run.
--
-- All of it only saves work. It is kept in cells, sequences that are never incremented: 64 bits
-- that all sessions share, neither transactional nor versioned, so that no snapshot can bloat
-- them, read with pg_sequence_last_value() and written with setval(). Two cells make a record:
--
--            of a lane                          of a queue
--   first    tag, valid until (us since 2020)   tag, valid until; how its lanes are listed
--   second   position (us since 2020), check    its highest seven lanes, in nine bits each
--
-- If several jobs have the same run_at, a position also needs the id of the last pick. That is in a cell which
-- lanes share, so the check says whether it is this lane's. The lowest bit of "valid until" says that the walk
-- which left the position was long, more than 5 ms.
--
-- Most queues have one lane, 0, and no record: a bit of lanes_seq, for each fold of their names, says that other lanes
-- have been used. The jobs of groups have lanes of their own, 1000 + priority; the position of such a lane is one
-- among its tickets, and its lowest bits say how often in a row filtered claims (see pick) stopped before the end, or
-- 4095 if they found nothing at all. A queue's own record is hashed with 9999, which is not a lane.
--
-- The tag says whose record it is; zero means unused. There are 16 records. The hash of a lane or queue gives it
-- two to choose from, and it takes the one that expired first; while others use both, it is walked from the
-- beginning. A value from another clock (set back, restored) is ignored.

-- The record of a lane or of a queue, by its hash: the number of its first cell, the tag, and until when it is
-- valid. If it has no record, valid_until is null, and record is the one to take. Hot paths inline the look-up.
create or replace function pgqueue._record(key bigint, out record int, out tag bigint, out valid_until bigint)
    language plpgsql
as $$
declare
    cell int;
    held bigint;
    first_end bigint;
begin
    tag := (key >> 20 & 4095) << 51;
    foreach cell in array array[(key & 15) * 2, (key >> 4 & 15) * 2]::int[] loop
        held := coalesce(pg_sequence_last_value(('pgqueue._cell_' || cell)::regclass), 0);
        if held > 0 and (held # tag) >> 51 = 0 then
            record := cell;
            valid_until := held # tag;
            return;
        elsif (held & 2251799813685247 >= first_end) is not true then
            record := cell;
            first_end := held & 2251799813685247;
        end if;
    end loop;
end;
$$;

-- Microseconds since 2020: 51 bits hold them until 2091. The planner inlines it, because what it calls is immutable.
create or replace function pgqueue._since_2020(moment timestamptz)
    returns bigint
    language sql
    immutable
as $$
    select (date_part('epoch', moment - timestamptz '2020-01-01 00:00 UTC') * 1000000)::bigint
$$;

-- How long the result of a walk stays valid: 20 times as long as it took, so that walks use a twentieth of the time.
create or replace function pgqueue._believed_until(began timestamptz, at_least interval)
    returns timestamptz
    language plpgsql
as $$
begin
    return clock_timestamp() + least(greatest(at_least, 20 * (clock_timestamp() - began)), interval '1 minute');
end;
$$;

-- When to sweep again, in microseconds since 2020: sweeps use a twentieth of the time, but run at least
-- once a second, because a sweep is short, and one that took long was only waiting for the machine.
create or replace function pgqueue._swept_until(began timestamptz, at_least interval)
    returns bigint
    language plpgsql
as $$
begin
    return pgqueue._since_2020(
        least(pgqueue._believed_until(began, at_least), clock_timestamp() + interval '1 second')
    );
end;
$$;

-- The lanes in which a queue has any job, and the first run_at of each: one index descent per lane. If walks of
-- lane 0 are long, because an old snapshot keeps its dead entries, it is listed without a descent.
create or replace function pgqueue._live_lanes(queue text)
    returns table (lane int, first timestamptz)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    key bigint := hashtextextended(queue collate "default", 0);
    has_long_walks boolean := case
        -- Checked inline first: a call would add a quarter to a claim that finds nothing.
        when 1 in (
            pg_sequence_last_value(('pgqueue._cell_' || (key & 15) * 2)::regclass) & 1,
            pg_sequence_last_value(('pgqueue._cell_' || (key >> 4 & 15) * 2)::regclass) & 1
        ) then (pgqueue._believed(key, clock_timestamp())).until is not null
        else false
    end;
begin
    return query
    with recursive live (lane, first) as (
        select a.lane, a.first
        from (values (-2147483648, null::timestamptz), (0, '-infinity')) as a (lane, first)
        where a.lane < 0 or has_long_walks
        union all
        select f.*
        from live as l
        cross join lateral (
            select j.priority + 1000 * num_nonnulls(j.group_key), j.run_at
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_live_lanes.queue collate "default") and j.queue = _live_lanes.queue
                and (j.priority + 1000 * num_nonnulls(j.group_key)) > l.lane
                and (j.priority + 1000 * num_nonnulls(j.group_key))
                    < case when has_long_walks and l.lane < 0 then 0 else 2147483647 end
            order by (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
            limit 1
        ) as f
    )
    select l.lane, l.first from live as l where l.first is not null;
end;
$$;

-- Whether each of these queues may have jobs: one index descent for each. Where an old snapshot keeps the dead entries
-- of many jobs, a descent is slow. Then the answer is yes, so that a claim leaves a position behind them; as long as
-- that is valid, the queue, and any that shares its record, is not looked up here.
create or replace function pgqueue._may_have_jobs(queues text[])
    returns boolean[]
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
as $$
declare
    began timestamptz := clock_timestamp();
    -- See _live_lanes.
    are_long boolean[] := array(
        select coalesce(pg_sequence_last_value(('pgqueue._cell_' || n * 2)::regclass) & 1 = 1, false)
        from generate_series(0, 15) as n
    );
begin
    return array(
        select l.has_jobs or l.looked_at > lag(l.looked_at, 1, began) over (order by l.place) + interval '5 milliseconds'
        from (
            select
                q.place,
                are_long[1 + (q.key & 15)] or are_long[1 + (q.key >> 4 & 15)] or exists (
                    select
                    from pgqueue.job as j
                    where hashtext(j.queue) = hashtext(q.name) and j.queue = q.name
                    -- Otherwise Postgres 18 reads all jobs into a hash table.
                    offset 0
                ) as has_jobs,
                clock_timestamp() as looked_at
            from (
                select u.name collate "default" as name, hashtextextended(u.name collate "default", 0) as key, u.place
                from unnest(queues) with ordinality as u (name, place)
            ) as q
            offset 0
        ) as l
        order by l.place
    );
end;
$$;

-- The lanes that have any job, and where each begins: one index descent per lane.
create or replace function pgqueue._lanes()
    returns table (queue text, lane int, first timestamptz)
    language plpgsql
    stable
    set enable_sort = off
    set enable_bitmapscan = off
as $$
begin
    return query
    with recursive lanes (hash, queue, lane, first) as (
        values (-2147483648, '', -2147483648, null::timestamptz)
        union all
        select n.*
        from lanes as l
        cross join lateral (
            select hashtext(j.queue), j.queue, j.priority + 1000 * num_nonnulls(j.group_key), j.run_at
            from pgqueue.job as j
            -- "j.queue >= ''" is always true, but proves the predicate of the index, queue is not null.
            where (hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key))) > (l.hash, l.lane) and j.queue >= ''
            order by hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
            limit 1
        ) as n
    )
    select l.queue, l.lane, l.first from lanes as l where l.first is not null;
end;
$$;

-- The lanes of a queue in which any job is due or runs, highest priority first. Two lanes of the same priority are
-- in random order, so that jobs with and without a group get half of the claims each.
create or replace function pgqueue._due_lanes(queue text, moment timestamptz)
    returns int[]
    language plpgsql
as $$
begin
    return array(
        select l.lane
        from pgqueue._live_lanes(_due_lanes.queue) as l
        where l.first <= _due_lanes.moment
        order by case when l.lane > 500 then l.lane - 1000 else l.lane end desc, random()
    );
end;
$$;

-- From now on, claims look for lanes of a queue other than 0.
create or replace function pgqueue._use_lanes(queue text)
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._mark(1::bigint << (hashtext(queue collate "default") & 63), 'pgqueue.lanes_seq');
end;
$$;

-- Lists, for all sessions, the lanes of a queue that have jobs to run: valid for 20 times as long as it took to
-- find out, since moment. A lane is written as priority + 101, plus 256 if it is a lane of groups.
create or replace function pgqueue._note_lanes(queue text, lanes int[], moment timestamptz)
    returns void
    language plpgsql
as $$
declare
    own record;
    codes bigint[] := array(
        select distinct (l.lane + 101) % 744 as code
        from unnest(lanes || 0) as l (lane) where l.lane >= -100 order by code
    );
    -- 0: only lane 0; 1: a list; 2: 0 and 1000; 3: a list with no room for all; 4: 1000, and 0 was empty.
    how int := case
        when codes = '{101}' then 0
        when codes = '{101,357}' then case when 0 = any (lanes) then 2 else 4 end
        when cardinality(codes) <= 7 then 1
        else 3
    end;
begin
    if pg_sequence_last_value('pgqueue.lanes_seq'::regclass) >> (hashtext(queue collate "default") & 63) & 1 = 0 then
        if how = 0 then
            return;
        end if;
        perform pgqueue._use_lanes(queue);
    end if;
    own := pgqueue._record(hashtextextended(queue collate "default", 9999));
    if how in (1, 3) then
        perform setval(('pgqueue._cell_' || own.record + 1)::regclass, bit_or(c.code << 9 * (c.nth - 1)::int))
        from (select u.code, row_number() over (order by u.code & 255 desc) as nth from unnest(codes) as u (code)) as c
        where c.nth <= 7;
    end if;
    perform setval(
        ('pgqueue._cell_' || own.record)::regclass,
        own.tag | pgqueue._since_2020(pgqueue._believed_until(moment, '100 milliseconds')) & -8 | how
    );
end;
$$;

-- The listed lanes of a queue, always with lane 0, in the order of _due_lanes (lane 0 comes after 1000 if it
-- was empty), with -1000 at the end if the list had no room for all; null if no list is valid.
create or replace function pgqueue._noted_lanes(queue text, moment timestamptz)
    returns int[]
    language plpgsql
as $$
declare
    now_us bigint := pgqueue._since_2020(moment);
    key bigint;
    record int;
    valid_until bigint;
    own record;
    list bigint;
begin
    if pg_sequence_last_value('pgqueue.lanes_seq'::regclass) >> (hashtext(queue collate "default") & 63) & 1 = 0 then
        return array[0];
    end if;
    -- As in _record, for the first one.
    key := hashtextextended(queue collate "default", 9999);
    record := (key & 15) * 2;
    valid_until := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # (key >> 20 & 4095) << 51;
    if (valid_until between 0 and 2251799813685247) is not true then
        own := pgqueue._record(key);
        record := own.record;
        valid_until := own.valid_until;
    end if;
    if (valid_until between now_us and now_us + 60000000) is not true then
        return null;
    elsif valid_until & 7 = 4 then
        return array[1000, 0];
    elsif valid_until & 7 = 0 then
        return array[0];
    elsif valid_until & 7 = 2 then
        return case when random() < 0.5 then array[0, 1000] else array[1000, 0] end;
    end if;
    list := pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass);
    return array(
        select (c.code - 101 + case when c.code > 256 then 744 else 0 end)::int
        from (select list >> 9 * n & 511 as code from generate_series(0, 6) as n) as c
        where c.code > 0
        order by c.code & 255 desc, random()
    ) || case when valid_until & 7 = 3 then array[-1000] end;
end;
$$;

-- Makes claims look at once at a lane, other than 0, in which a job appears. It is a hint, given before the commit;
-- without it they look within 100 ms.
create or replace function pgqueue._list_lane(queue text, lane int)
    returns void
    language plpgsql
as $$
declare
    own record;
    now_us bigint := pgqueue._since_2020(clock_timestamp());
    list bigint := 357;
    code int := (lane + 101) % 744;
begin
    if pg_sequence_last_value('pgqueue.lanes_seq'::regclass) >> (hashtext(queue collate "default") & 63) & 1 = 0 then
        perform pgqueue._use_lanes(queue);
    end if;
    own := pgqueue._record(hashtextextended(queue collate "default", 9999));
    -- If no list is valid, the next claim makes one.
    if (own.valid_until between now_us and now_us + 60000000) is not true then
        return;
    elsif own.valid_until & 7 = 0 then
        list := 0;
    elsif own.valid_until & 7 in (1, 3) then
        list := pg_sequence_last_value(('pgqueue._cell_' || own.record + 1)::regclass);
    end if;
    if code in (
            list & 511, list >> 9 & 511, list >> 18 & 511, list >> 27 & 511,
            list >> 36 & 511, list >> 45 & 511, list >> 54
        )
        -- Its priority is below those for which the list has room.
        or own.valid_until & 7 = 3 and code & 255 <= list >> 54 & 255
    then
        return;
    end if;
    perform pgqueue._note_lanes(queue, pgqueue._noted_lanes(queue, clock_timestamp()) || lane, clock_timestamp());
end;
$$;

-- Moves the position of a lane back to before a job that a claim picked but did not take.
create or replace function pgqueue._return_position(queue text, kinds text[], paused jsonb, lane int, at timestamptz)
    returns void
    language plpgsql
as $$
declare
    own record := pgqueue._record(hashtextextended(concat(queue, kinds, paused) collate "default", lane));
    cell regclass := ('pgqueue._cell_' || own.record + 1)::regclass;
    -- A microsecond before it, so that its id does not matter.
    reached bigint := pgqueue._since_2020(at) - 1;
begin
    if own.valid_until > 0 and pg_sequence_last_value(cell) >> 12 > reached then
        perform setval(cell, greatest(reached, 0) << 12);
    end if;
end;
$$;

-- The record of a lane, by its hash, and the position that it holds: null if none is valid. has_expired: this
-- claim has to walk from the beginning.
create or replace function pgqueue._position(
    key bigint, moment timestamptz,
    out record int, out reached bigint, out last_id bigint, out has_expired boolean
)
    language plpgsql
as $$
declare
    own record := pgqueue._record(key);
    now_us bigint := pgqueue._since_2020(moment);
begin
    record := own.record;
    has_expired := false;
    if own.valid_until between now_us and now_us + 60000000 then
        reached := pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass);
        last_id := pg_sequence_last_value(('pgqueue._cell_tie_' || (key & 3))::regclass);
        if (last_id % 4095 + 1 = reached & 4095) is not true then
            last_id := 0;
        end if;
    elsif own.valid_until between now_us - 1000000 and now_us then
        -- This claim walks from the beginning; meanwhile the others go on, for longer if such walks take long.
        perform setval(
            ('pgqueue._cell_' || record)::regclass,
            own.tag | case when own.valid_until & 1 = 1 then now_us + 1000000 | 1 else now_us + 100000 & -2 end
        );
        has_expired := true;
    end if;
end;
$$;

-- What a claim need not look at again, because a long walk has left a position in a lane (by its hash). until: how
-- long that is valid; since: tickets from then on have to be looked at; new_since: so do jobs from then on, which
-- may be committed late; cuts: how often in a row a walk of groups stopped before the end; is_none: it found
-- nothing at all. All null if there is no such position.
create or replace function pgqueue._believed(
    key bigint, moment timestamptz, out until timestamptz, out since timestamptz, out new_since timestamptz, out cuts int,
    out is_none boolean
)
    language plpgsql
as $$
declare
    own record := pgqueue._record(key);
    now_us bigint := pgqueue._since_2020(moment);
    position bigint;
    reached timestamptz;
begin
    if own.valid_until between now_us and now_us + 60000000 and own.valid_until & 1 = 1 then
        position := pg_sequence_last_value(('pgqueue._cell_' || own.record + 1)::regclass);
        is_none := position & 4095 = 4095;
        cuts := (position & 4095) % 4095;
        until := moment + (own.valid_until - now_us) * interval '1 microsecond';
        reached := timestamptz '2020-01-01 00:00 UTC' + (position >> 12) * interval '1 microsecond';
        since := least(reached, moment - interval '100 milliseconds');
        new_since := least(case when cuts = 0 then reached end, moment - interval '1 second');
    end if;
end;
$$;

-- Moves the position of a lane from known to reached, with last_id if several jobs have the same time.
-- valid_until is given if the walk began at the beginning of the lane, null if it began at the position.
create or replace function pgqueue._leave_position(
    key bigint, record int, known bigint, reached bigint, last_id bigint, valid_until bigint
)
    returns void
    language plpgsql
as $$
begin
    record := coalesce(record, (pgqueue._record(key)).record);
    if reached < 0 then
        -- A cell holds nothing before 2020: the next claim walks from the beginning.
        perform setval(('pgqueue._cell_' || record)::regclass, 0);
        return;
    end if;
    if last_id > 0 then
        perform setval(('pgqueue._cell_tie_' || (key & 3))::regclass, last_id);
    end if;
    -- Move it back only if jobs were found before it: other claims may have moved it on meanwhile.
    known := case
        when valid_until is null or reached >= known >> 12
            then pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass)
    end;
    if (reached < known >> 12) is not true then
        perform setval(
            ('pgqueue._cell_' || record + 1)::regclass,
            reached << 12 | case when last_id > 0 then last_id % 4095 + 1 else 0 end
        );
    end if;
    if valid_until is not null then
        perform setval(
            ('pgqueue._cell_' || record)::regclass,
            (key >> 20 & 4095) << 51 | valid_until & -2
                | (valid_until > pgqueue._since_2020(clock_timestamp()) + 100000)::int
        );
    end if;
end;
$$;

-- From when on to look in an index by time that is no lane's, if a long look has left a position there: at the latest
-- from a second ago on. What was committed even later than that waits for the next long look.
create or replace function pgqueue._begin_at(index regclass, moment timestamptz)
    returns timestamptz
    language plpgsql
as $$
begin
    return case when pg_relation_size(index) < 200000 then '-infinity'
        else coalesce((pgqueue._believed(hashtextextended(index::text, 0), moment)).new_since, '-infinity')
    end;
end;
$$;

-- Lets others begin there until then. Without a time, it moves the position that there is on.
create or replace function pgqueue._begin_later(index regclass, reached timestamptz, until timestamptz default null)
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._leave_position(
        hashtextextended(index::text, 0), null, null, pgqueue._since_2020(reached), null, pgqueue._since_2020(until)
    );
end;
$$;

-- After a look since then that found this number, when so many entries had been read before, and stopped there (last; null:
-- it found all). Where it began at the beginning and was long, because an old snapshot keeps the entries of what was
-- handled before, others need not do so.
create or replace function pgqueue._looked(
    index regclass, since timestamptz, began timestamptz, walked bigint, number bigint, last timestamptz
)
    returns void
    language plpgsql
as $$
begin
    if since > '-infinity' then
        if last is not null then
            perform pgqueue._begin_later(index, last);
        end if;
    elsif pg_relation_size(index) > 1000000 or 1000 + 3 * number < pg_stat_get_xact_tuples_returned(index) - walked then
        perform pgqueue._begin_later(
            index, coalesce(last, began), pgqueue._believed_until(began, '100 milliseconds')
        );
    end if;
end;
$$;

-- Lets claims know of a job where they would not look at once: outside lane 0, or before the position of its lane.
-- Then the next claim walks from the beginning, unless that is expensive. It is a hint, given before the commit.
create or replace function pgqueue._announce(queue text, priority int, run_at timestamptz)
    returns void
    language plpgsql
as $$
declare
    own record;
    now_us bigint;
begin
    if priority <> 0 then
        perform pgqueue._list_lane(queue, priority);
    end if;
    if run_at <= clock_timestamp() then
        own := pgqueue._record(hashtextextended(queue collate "default", coalesce(priority, 0)));
        now_us := pgqueue._since_2020(clock_timestamp());
        if own.valid_until between now_us and now_us + 100000 then
            perform setval(('pgqueue._cell_' || own.record)::regclass, own.tag);
        end if;
    end if;
end;
$$;
