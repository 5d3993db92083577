-- What claims remember for each other, and which lanes of a queue have jobs to run.
--
-- It only saves work. It is kept in cells, sequences that are never incremented: 64 bits
-- that all sessions share, neither transactional nor versioned, so that no snapshot can bloat
-- them, read with pg_sequence_last_value() and written with setval(). Five make a record:
--
--            of a lane                                of a queue
--   first    tag, valid until (us since 2020)         tag, valid until; 1: other lanes, 2: of groups
--   second   position (us since 2020), check          priorities 1 to 50, a bit each
--   third    id of the last pick, where times tie     priorities 51 to 100
--   fourth                                            priorities -1 to -50
--   fifth                                             priorities -51 to -100
--
-- The jobs of groups have lanes of their own, 1000 + priority, and the position of such a lane is one
-- among its tickets. The record of a queue has the number 9999, which no lane has.
--
-- From 640 on each holds a job that a batch still had at the last look (module batch).
--
-- The tag says whose record it is; zero means unused. A lane has two records to choose from, by
-- its hash; while others have taken both, it is walked from the beginning. A value from another
-- clock (set back, restored) is ignored.

create or replace function pgqueue._cell(record int, place int)
    returns regclass
    language plpgsql
    stable
as $$
begin
    return ('pgqueue._cell_' || record * 5 + place)::regclass;
end;
$$;

comment on function pgqueue._cell(int, int) is
'One cell, 0 to 4, of a record. Hot paths inline this.';

create or replace function pgqueue._since_2020(moment timestamptz)
    returns bigint
    language plpgsql
    immutable
as $$
begin
    return (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
end;
$$;

comment on function pgqueue._since_2020(timestamptz) is
'Microseconds since 2020: 51 bits hold them until 2091. Hot paths inline this.';

create or replace function pgqueue._believed_until(began timestamptz, at_least interval)
    returns timestamptz
    language plpgsql
as $$
begin
    return clock_timestamp() + least(
        greatest(at_least, 20 * (clock_timestamp() - began)), interval '1 minute'
    );
end;
$$;

comment on function pgqueue._believed_until(timestamptz, interval) is
'How long the result of a walk that began then stays valid: so that walks take a
twentieth of the time.';

create or replace function pgqueue._live_lanes(queue text)
    returns table (lane int, first timestamptz)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    return query
    with recursive live (lane, first) as (
        values (-2147483648, null::timestamptz)
        union all
        select f.*
        from live as l
        cross join lateral (
            select j.priority + 1000 * num_nonnulls(j.group_key), j.run_at
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_live_lanes.queue) and j.queue = _live_lanes.queue
                and (j.priority + 1000 * num_nonnulls(j.group_key)) > l.lane
            order by (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
            limit 1
        ) as f
    )
    select l.lane, l.first from live as l where l.first is not null;
end;
$$;

comment on function pgqueue._live_lanes(text) is
'The lanes in which a queue has any job, lowest first, and the first run_at of
each: one index descent per lane.';

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

comment on function pgqueue._due_lanes(text, timestamptz) is
'The lanes of a queue in which any job is due or runs, highest priority first;
two of one priority in random order: so that jobs of groups, and others, get
half of the claims each.';

create or replace function pgqueue._note_lanes(queue text, lanes int[], moment timestamptz)
    returns void
    language plpgsql
as $$
declare
    key bigint := hashtextextended(queue, 9999);
    record int := key & 127;
    valid_until bigint := pgqueue._since_2020(pgqueue._believed_until(moment, '100 milliseconds'));
    has_groups boolean := exists (select from unnest(lanes) as l (lane) where l.lane > 500);
    priorities int[] := array(
        select case when l.lane > 500 then l.lane - 1000 else l.lane end from unnest(lanes) as l (lane)
    );
    has_others boolean := exists (select from unnest(priorities) as p (priority) where p.priority <> 0);
begin
    if has_others then
        perform setval(pgqueue._cell(record, b.place), b.listed)
        from (
            select b.place, coalesce(bit_or(1::bigint << (abs(p.priority) - 1) % 50), 0) as listed
            from (values (1, 1, 50), (2, 51, 100), (3, -50, -1), (4, -100, -51))
                as b (place, lowest, highest)
            left join unnest(priorities) as p (priority) on p.priority between b.lowest and b.highest
            group by b.place
        ) as b;
    end if;
    perform setval(
        pgqueue._cell(record, 0),
        ((key >> 20 & 4095) << 51) | (valid_until & -4) | has_others::int | (has_groups::int << 1)
    );
end;
$$;

comment on function pgqueue._note_lanes(text, int[], timestamptz) is
'Lists, for all sessions, the lanes of a queue that have jobs to run: valid for
20 times as long as it took, since moment, to find out.';

create or replace function pgqueue._noted_lanes(queue text, moment timestamptz)
    returns int[]
    language plpgsql
as $$
declare
    key bigint := hashtextextended(queue, 9999);
    record int := key & 127;
    now_us bigint := pgqueue._since_2020(moment);
    noted bigint := pg_sequence_last_value(pgqueue._cell(record, 0)) # ((key >> 20 & 4095) << 51);
    listed bigint[];
begin
    if (noted between now_us and now_us + 60000000) is not true then
        return null;
    elsif noted & 3 = 0 then
        return array[0];
    elsif noted & 3 = 2 then
        return case when random() < random() then array[0, 1000] else array[1000, 0] end;
    end if;
    listed := array(
        select case when noted & 1 > 0 then pg_sequence_last_value(pgqueue._cell(record, b.place)) end
        from generate_series(1, 4) as b (place)
        order by b.place
    );
    return array(
        select l.lane + r.of_groups
        from generate_series(100, -100, -1) as l (lane)
        cross join generate_series(0, case when noted & 2 > 0 then 1000 else 0 end, 1000) as r (of_groups)
        where l.lane = 0 or (1::bigint << (abs(l.lane) - 1) % 50) & listed[
            case when l.lane > 50 then 2 when l.lane > 0 then 1 when l.lane >= -50 then 3 else 4 end
        ] > 0
        order by l.lane desc, random()
    );
end;
$$;

comment on function pgqueue._noted_lanes(text, timestamptz) is
'The listed lanes of a queue, always with lane 0, and those of groups, in the
order of _due_lanes; null if no list is valid.';

create or replace function pgqueue._list_lane(queue text, lane int)
    returns void
    language plpgsql
as $$
declare
    key bigint := hashtextextended(queue, 9999);
    record int := key & 127;
    now_us bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint - 1577836800000000;
    noted bigint := pg_sequence_last_value(('pgqueue._cell_' || record * 5)::regclass) # ((key >> 20 & 4095) << 51);
    is_group boolean := lane > 500;
    priority int := lane - case when is_group then 1000 else 0 end;
    bit bigint := 1::bigint << (abs(priority) - 1) % 50;
    cell regclass;
begin
    -- If no list is valid, the next claim looks for itself.
    if (noted between now_us and now_us + 60000000) is not true or lane = 0 then
        return;
    elsif is_group and noted & 2 = 0 or priority <> 0 and noted & 1 = 0 then
        perform pgqueue._note_lanes(
            queue,
            array[priority, case when is_group or noted & 2 > 0 then 1000 + priority end]
                || case when noted & 1 > 0 then pgqueue._noted_lanes(queue, clock_timestamp()) end,
            clock_timestamp()
        );
        return;
    elsif priority = 0 then
        return;
    end if;
    cell := pgqueue._cell(
        record,
        case when priority > 50 then 2 when priority > 0 then 1 when priority >= -50 then 3 else 4 end
    );
    if pg_sequence_last_value(cell) & bit = 0 then
        perform setval(cell, pg_sequence_last_value(cell) | bit);
    end if;
end;
$$;

comment on function pgqueue._list_lane(text, int) is
'For a job that appears in a lane: makes claims look there at once. A hint, given
before the commit; without it they look within 100 ms.';

create or replace function pgqueue._return_position(
    queue text, kinds text[], paused jsonb, lane int, at timestamptz
)
    returns void
    language plpgsql
as $$
declare
    key bigint := hashtextextended(concat(queue, kinds, paused), lane);
    -- A little before, whatever the id.
    reached bigint := pgqueue._since_2020(at) - 1;
begin
    perform setval(pgqueue._cell(r.record, 1), greatest(reached, 0) << 12)
    from (select distinct u.* from unnest(array[key & 127, key >> 7 & 127]::int[]) as u) as r (record)
    where (pg_sequence_last_value(pgqueue._cell(r.record, 0)) # ((key >> 20 & 4095) << 51)) >> 51 = 0
        and pg_sequence_last_value(pgqueue._cell(r.record, 1)) >> 12 > reached;
end;
$$;

comment on function pgqueue._return_position(text, text[], jsonb, int, timestamptz) is
'For a job that a claim picked and did not take: moves the position of its lane
back before it.';

create or replace function pgqueue._reopen_lane(queue text, lane int)
    returns void
    language plpgsql
as $$
declare
    key bigint := hashtextextended(queue, lane);
    now_us bigint := pgqueue._since_2020(clock_timestamp());
begin
    perform pgqueue._list_lane(queue, lane);
    perform setval(pgqueue._cell(r.record, 0), (key >> 20 & 4095) << 51)
    from unnest(array[key & 127, key >> 7 & 127]::int[]) as r (record)
    where (pg_sequence_last_value(pgqueue._cell(r.record, 0)) # ((key >> 20 & 4095) << 51))
        between now_us and now_us + 100000;
end;
$$;

comment on function pgqueue._reopen_lane(text, int) is
'For a job that appears behind the position of its lane: makes the next claim
walk from the beginning, unless that is expensive. A hint, given before the
commit.';

create or replace function pgqueue._position(
    key bigint, moment timestamptz,
    out record int, out reached bigint, out last_id bigint, out has_expired boolean
)
    language plpgsql
as $$
declare
    tag bigint := (key >> 20 & 4095) << 51;
    now_us bigint := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
    valid_until bigint;
begin
    foreach record in array array[(key & 127) * 5, (key >> 7 & 127) * 5]::int[] loop
        valid_until := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
        exit when (valid_until >> 51 > 0) is not true;
    end loop;
    has_expired := false;
    if valid_until between now_us and now_us + 60000000 then
        reached := pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass);
        last_id := pg_sequence_last_value(('pgqueue._cell_' || record + 2)::regclass);
        if (last_id % 4095 + 1 = reached & 4095) is not true then
            last_id := 0;
        end if;
    elsif valid_until between now_us - 1000000 and now_us then
        -- This claim walks from the beginning, the others go on.
        perform setval(('pgqueue._cell_' || record)::regclass, tag | now_us + 100000);
        has_expired := true;
    end if;
end;
$$;

comment on function pgqueue._position(bigint, timestamptz) is
'The record of a lane, by its hash, and the position in it: null if none is
valid.';

create or replace function pgqueue._leave_place(
    key bigint, record int, reached timestamptz, id bigint, began timestamptz
)
    returns void
    language plpgsql
as $$
declare
    reached_us bigint := pgqueue._since_2020(reached);
    last_id bigint := coalesce(id - 1, 0);
begin
    if reached_us < 0 then
        return;
    end if;
    perform setval(('pgqueue._cell_' || record + 2)::regclass, last_id);
    perform setval(
        ('pgqueue._cell_' || record + 1)::regclass,
        reached_us << 12 | case when last_id > 0 then last_id % 4095 + 1 else 0 end
    );
    if began is not null then
        perform setval(
            ('pgqueue._cell_' || record)::regclass,
            ((key >> 20 & 4095) << 51)
                | pgqueue._since_2020(pgqueue._believed_until(began, interval '100 milliseconds'))
        );
    end if;
end;
$$;

comment on function pgqueue._leave_place(bigint, int, timestamptz, bigint, timestamptz) is
'Moves the position of a lane to just before this job, or to this moment; with a
new validity if a walk began at the beginning, at began.';
