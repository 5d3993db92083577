-- The pick: which jobs are due, in order, locked, however deep the queue. claim() comes here
-- for jobs, rest() for the lanes that hold any, and who adds or reopens a job to say where.
--
-- A lane is walked from its beginning. In front of the jobs that are ready stand those that
-- run, those that others are just claiming, and index entries of finished jobs that some old
-- snapshot keeps from being removed. While these are few nothing else happens. A walk that has
-- met many of them leaves a position for all sessions: the run_at up to which the jobs of the
-- lane have been taken. From then on claims start there and move it to their last pick at once,
-- before they commit, so that the next meets none of their rows; a claim of one only where its
-- walk was longer than usual. After 100 ms, or 20 times the duration of that walk, one claim
-- walks from the beginning again and finds what stands behind: late commits, releases, expired
-- leases, claims that were rolled back. A claim that finds nothing behind the position walks
-- from the beginning before it says so.
--
-- Memory only saves work. It is kept in cells, sequences that are never counted up: 64 bits
-- that all sessions share, neither transactional nor versioned, so that no snapshot can bloat
-- them, read with pg_sequence_last_value() and written with setval(). Five make a record:
--
--            of a lane                                of a queue
--   first    tag, valid until (us since 2020)         tag, valid until; odd: other lanes than 0
--   second   position (us since 2020), check          lanes 1 to 50, a bit each
--   third    id of the last pick, where run_at ties   lanes 51 to 100
--   fourth                                            lanes -1 to -50
--   fifth                                             lanes -51 to -100
--
-- The tag says whose record it is; zero is nobody's. A lane has two records to choose from, by
-- its hash; while others have taken both, it is walked from the beginning. A value from another
-- clock (set back, restored) is no value.

create or replace function pgqueue._cell(record int, place int)
    returns regclass
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $$ select ('pgqueue._cell_' || _cell.record * 5 + _cell.place)::regclass $$;

comment on function pgqueue._cell(int, int) is
'One cell, 0 to 4, of a record. What is hot writes this out.';

create or replace function pgqueue._since_2020(moment timestamptz)
    returns bigint
    language sql
    immutable
    set search_path = pg_catalog, pg_temp
as $$ select (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000 $$;

comment on function pgqueue._since_2020(timestamptz) is
'Microseconds since 2020: 51 bits hold them until 2091. What is hot writes this
out.';

create or replace function pgqueue._live_lanes(queue text)
    returns table (lane int, first_run_at timestamptz)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    return query
    with recursive live (lane, run_at) as (
        values (-2147483648, null::timestamptz)
        union all
        select f.priority, f.run_at
        from live as l
        cross join lateral (
            select j.priority, j.run_at
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_live_lanes.queue) and j.queue = _live_lanes.queue
                and j.priority > l.lane
            order by j.priority, j.run_at, j.id
            limit 1
        ) as f
    )
    select l.lane, l.run_at from live as l where l.run_at is not null;
end;
$$;

comment on function pgqueue._live_lanes(text) is
'The lanes of a queue that hold any job, lowest first, and the first run_at of
each: one descent of the index for each.';

create or replace function pgqueue._due_lanes(queue text, moment timestamptz)
    returns int[]
    language sql
    set search_path = pg_catalog, pg_temp
as $$
    select coalesce(array_agg(l.lane order by l.lane desc), '{}')
    from pgqueue._live_lanes(_due_lanes.queue) as l
    where l.first_run_at <= _due_lanes.moment
$$;

comment on function pgqueue._due_lanes(text, timestamptz) is
'The lanes of a queue in which any job is due or runs, highest first.';

create or replace function pgqueue._note_lanes(queue text, lanes int[], moment timestamptz)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    key bigint := hashtextextended(queue, 1000);
    record int := key & 127;
    valid_until bigint := pgqueue._since_2020(clock_timestamp() + least(
        greatest(interval '100 milliseconds', 20 * (clock_timestamp() - moment)),
        interval '1 minute'
    ));
    has_others boolean := exists (select from unnest(lanes) as l (lane) where l.lane <> 0);
begin
    if has_others then
        perform setval(pgqueue._cell(record, b.place), b.listed)
        from (
            select b.place, coalesce(bit_or(1::bigint << (abs(l.lane) - 1) % 50), 0) as listed
            from (values (1, 1, 50), (2, 51, 100), (3, -50, -1), (4, -100, -51))
                as b (place, lowest, highest)
            left join unnest(_note_lanes.lanes) as l (lane)
                on l.lane between b.lowest and b.highest
            group by b.place
        ) as b;
    end if;
    perform setval(
        pgqueue._cell(record, 0),
        ((key >> 20 & 4095) << 51) | (valid_until & -2) | has_others::int
    );
end;
$$;

comment on function pgqueue._note_lanes(text, int[], timestamptz) is
'Lists, for all sessions, the lanes of a queue that have something to do: valid
for 20 times as long as it took, since moment, to find out.';

create or replace function pgqueue._noted_lanes(queue text, moment timestamptz)
    returns int[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    key bigint := hashtextextended(queue, 1000);
    record int := key & 127;
    now_us bigint := pgqueue._since_2020(moment);
    noted bigint := pg_sequence_last_value(pgqueue._cell(record, 0)) # ((key >> 20 & 4095) << 51);
    listed bigint[];
begin
    if (noted between now_us and now_us + 60000000) is not true then
        return null;
    elsif noted & 1 = 0 then
        return array[0];
    end if;
    listed := array(
        select pg_sequence_last_value(pgqueue._cell(record, b.place))
        from generate_series(1, 4) as b (place)
        order by b.place
    );
    return array(
        select l.lane
        from generate_series(100, -100, -1) as l (lane)
        where l.lane = 0 or (1::bigint << (abs(l.lane) - 1) % 50) & listed[
            case when l.lane > 50 then 2 when l.lane > 0 then 1 when l.lane >= -50 then 3 else 4 end
        ] > 0
    );
end;
$$;

comment on function pgqueue._noted_lanes(text, timestamptz) is
'The listed lanes of a queue, highest first, always with lane 0; null where no
list is valid.';

create or replace function pgqueue._list_lane(queue text, lane int)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    key bigint := hashtextextended(queue, 1000);
    record int := key & 127;
    noted bigint := pg_sequence_last_value(pgqueue._cell(record, 0)) # ((key >> 20 & 4095) << 51);
    bit bigint := 1::bigint << (abs(lane) - 1) % 50;
    cell regclass;
begin
    -- Where no list is valid, the next claim looks for itself.
    if lane = 0 or (noted >> 51 = 0) is not true then
        return;
    elsif noted & 1 = 0 then
        perform pgqueue._note_lanes(queue, array[lane], clock_timestamp());
        return;
    end if;
    cell := pgqueue._cell(
        record,
        case when lane > 50 then 2 when lane > 0 then 1 when lane >= -50 then 3 else 4 end
    );
    if pg_sequence_last_value(cell) & bit = 0 then
        perform setval(cell, pg_sequence_last_value(cell) | bit);
    end if;
end;
$$;

comment on function pgqueue._list_lane(text, int) is
'For a job that appears in a lane: lets claims look there at once. A hint,
given before the commit; without it they look within 100 ms.';

create or replace function pgqueue._reopen_lane(queue text, lane int)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
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
'For a job that appears behind the position of its lane: lets the next claim
walk from the beginning, unless that is dear. A hint, given before the commit.';

create or replace function pgqueue._recover(
    queue text, lane int, picks tid[], expired_at timestamptz, moment timestamptz
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_tidscan = on
as $$
declare
    near tid[] := array(
        select j.ctid
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(_recover.queue) and j.queue = _recover.queue
            and j.priority = _recover.lane
            and j.run_at between _recover.expired_at and _recover.moment
        order by j.run_at, j.id
        limit 1000
    );
begin
    perform pgqueue._expire(
        array(
            select j.ctid
            from pgqueue.job as j
            where j.ctid = any (_recover.picks || near)
                and j.lease_expires_at <= _recover.moment
            for update skip locked
        ),
        moment
    );
    perform pgqueue._wake(queue);
end;
$$;

comment on function pgqueue._recover(text, int, tid[], timestamptz, timestamptz) is
'Ends the attempts of the jobs whose lease expired among some that were picked
and the next thousand of their lane, from expired_at on: so that one claim
finds all that a dead worker held, and no claim has to end ten thousand.';

create or replace function pgqueue._pick(
    queue text, kinds text[], lane int, wanted int, moment timestamptz, is_whole boolean
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    key bigint := hashtextextended(coalesce(queue || kinds::text, queue), lane);
    tag bigint := (key >> 20 & 4095) << 51;
    record int := (key & 127) * 5;
    valid_until bigint := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
    now_us bigint;
    position bigint;
    reached bigint;
    start timestamptz := '-infinity'::timestamptz;
    start_id bigint := 0;
    began timestamptz;
    walked bigint;
    picks tid[];
    last_run_at timestamptz;
    expired_at timestamptz;
    has_recovered boolean := false;
begin
    -- The second record, when the first is somebody else's; either of them, when both are.
    if valid_until >> 51 > 0 then
        record := (key >> 7 & 127) * 5;
        valid_until := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
        if valid_until >> 51 > 0 then
            valid_until := 0;
            record := case when random() < 0.5 then record else (key & 127) * 5 end;
        end if;
    end if;
    if valid_until > 0 then
        position := pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass);
    end if;
    if valid_until > 0 and not is_whole then
        now_us := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
        if valid_until between now_us and now_us + 60000000 then
            start := '2020-01-01 00:00 UTC'::timestamptz + (position >> 12) * interval '1 microsecond';
            if position & 4095 > 0 then
                start_id := pg_sequence_last_value(('pgqueue._cell_' || record + 2)::regclass);
            end if;
            if (start < moment) is not true then
                start := '-infinity';
                position := null;
            end if;
            if (start_id % 4095 + 1 = position & 4095) is not true then
                start_id := 0;
            end if;
        elsif valid_until between now_us - 1000000 and now_us then
            -- This claim walks from the beginning, the others go on.
            perform setval(('pgqueue._cell_' || record)::regclass, tag | now_us + 100000);
        end if;
    end if;

    loop
        began := clock_timestamp();
        walked := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
            + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass);
        select array_agg(due.tid), max(due.run_at), min(due.run_at) filter (where due.is_leased)
        into picks, last_run_at, expired_at
        from (
            select j.ctid as tid, j.run_at, j.lease_expires_at is not null as is_leased
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_pick.queue) and j.queue = _pick.queue
                and j.priority = lane
                and j.run_at <= _pick.moment and (j.run_at, j.id) > (start, start_id)
                and (
                    j.lease_expires_at is null
                    or j.lease_expires_at <= _pick.moment and (
                        not has_recovered or j.attempt < j.max_attempts and j.cancelled_at is null
                    )
                )
                and (_pick.kinds is null or j.kind = any (_pick.kinds))
            order by j.run_at, j.id
            limit wanted
            for update skip locked
        ) as due;
        if expired_at is not null then
            -- Those that come back are found where they stood.
            perform pgqueue._recover(queue, lane, picks, expired_at, moment);
            has_recovered := true;
            continue;
        end if;
        exit when start = '-infinity' or cardinality(picks) = wanted or picks is null
            -- Short, where a walk from the beginning is dear.
            or valid_until > now_us + 100000;
        start := '-infinity';
        start_id := 0;
    end loop;

    -- Entries that it met, and pages: a measure that depends neither on the machine nor on the
    -- moment.
    walked := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
        + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass) - walked
        - 3 * coalesce(cardinality(picks), 0);
    if start > '-infinity' and (picks is null or wanted = 1 and walked <= 60) then
        return coalesce(picks, '{}'::tid[]);
    elsif start = '-infinity' then
        if walked <= 200 or picks is null and clock_timestamp() < began + interval '5 milliseconds' then
            return coalesce(picks, '{}'::tid[]);
        end if;
        valid_until := pgqueue._since_2020(clock_timestamp() + least(
            greatest(interval '100 milliseconds', 20 * (clock_timestamp() - began)),
            interval '1 minute'
        ));
    end if;
    -- An enqueue that commits within 10 ms is never behind the position.
    last_run_at := least(
        case when cardinality(picks) = wanted then last_run_at else moment end,
        moment - interval '10 milliseconds'
    );
    reached := (date_part('epoch', last_run_at) * 1000000)::bigint - 1577836800000000;
    start_id := 0;
    if reached = position >> 12 then
        select j.id into start_id from pgqueue.job as j where j.ctid = picks[wanted];
        perform setval(('pgqueue._cell_' || record + 2)::regclass, start_id);
    end if;
    -- Back only if something stood behind: others may have come further meanwhile.
    position := case
        when start > '-infinity' or reached >= position >> 12
            then pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass)
    end;
    if (reached < position >> 12) is not true then
        position := reached << 12 | case when start_id > 0 then start_id % 4095 + 1 else 0 end;
        perform setval(('pgqueue._cell_' || record + 1)::regclass, position);
    end if;
    if start = '-infinity' then
        perform setval(('pgqueue._cell_' || record)::regclass, tag | valid_until);
    end if;
    return coalesce(picks, '{}'::tid[]);
end;
$$;

comment on function pgqueue._pick(text, text[], int, int, timestamptz, boolean) is
'Locks up to so many due jobs of one lane and returns where they are, in the
order in which they run; ends the attempts of those whose lease expired on the
way. Only from the beginning (is_whole) does "none" mean that there is none.
Plans as claim sets it.';

create or replace function pgqueue._pick_lanes(
    queue text, kinds text[], max_jobs int, moment timestamptz, noted int[]
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    live int[];
    lane int;
    is_whole boolean := false;
    picks tid[] := '{}'::tid[];
begin
    if noted is null then
        live := pgqueue._due_lanes(queue, moment);
    end if;
    loop
        foreach lane in array coalesce(noted, live) loop
            picks := picks || pgqueue._pick(
                queue, kinds, lane, max_jobs - cardinality(picks), moment, is_whole
            );
            exit when cardinality(picks) = max_jobs;
        end loop;
        exit when picks <> '{}' or is_whole;
        live := coalesce(live, pgqueue._due_lanes(queue, moment));
        noted := null;
        is_whole := true;
    end loop;
    if live is not null
        and (picks <> '{}' or clock_timestamp() > moment + interval '5 milliseconds')
    then
        perform pgqueue._note_lanes(queue, live, moment);
    end if;
    return picks;
end;
$$;

comment on function pgqueue._pick_lanes(text, text[], int, timestamptz, int[]) is
'_pick in the listed lanes of a queue, highest first, then, if nothing was
found or no list is valid, from the beginning of all that have something due.';
