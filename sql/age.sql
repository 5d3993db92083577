-- Ageing: after each age_after a waiting job counts as one priority higher, so that none starves.
--
-- Nothing is written for it: within a lane the order stays, so only the lanes are to be compared. A
-- claim looks, without a lock, at the first jobs of each, from the position that room pick has left;
-- lower lanes only as far back as a job must have waited to come before those of the lanes above. Then
-- each lane has its share of the claim, and _pick takes it. Where others took some of them meanwhile, it
-- takes the next of the same lane, and the rest by priority.
--
-- In a round a job is served in its turn: it counts as waiting since the last of those before it.

create or replace function pgqueue._aged(
    priority int, run_at timestamptz, moment timestamptz, age_after interval
)
    returns float8
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return priority + coalesce(
        floor(date_part('epoch', moment - run_at) / date_part('epoch', age_after)), 0
    );
end;
$$;

comment on function pgqueue._aged(int, timestamptz, timestamptz, interval) is
'The priority as which a job counts that has been due since run_at; its own
where nothing ages.';

create or replace function pgqueue._due_by(
    priority int, other int, run_at timestamptz, moment timestamptz, age_after interval
)
    returns timestamptz
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
declare
    age float8 := date_part('epoch', age_after);
    steps float8 := other - priority + floor(date_part('epoch', moment - run_at) / age);
begin
    if age_after is null then
        return case when priority > other then moment else '-infinity' end;
    end if;
    return least(moment, greatest(
        moment - make_interval(secs => (steps + 1) * age),
        least(run_at, moment - make_interval(secs => steps * age))
    ));
end;
$$;

comment on function pgqueue._due_by(int, int, timestamptz, timestamptz, interval) is
'By when a job of a priority must have been due to be served before, or with,
one of another priority that is due since run_at.';

create or replace function pgqueue._position(
    key bigint, moment timestamptz,
    out record int, out reached bigint, out last_id bigint, out has_expired boolean
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    tag bigint := (key >> 20 & 4095) << 51;
    now_us bigint := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
    valid_until bigint;
begin
    foreach record in array array[(key & 127) * 6, (key >> 7 & 127) * 6]::int[] loop
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
'The record of a lane, by its hash, and the position in it: null where none is
valid.';

create or replace function pgqueue._leave_place(
    key bigint, record int, is_round boolean, reached timestamptz, id bigint, began timestamptz
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    origin timestamptz := case when is_round
        then timestamptz '1800-01-01 00:00 UTC' else timestamptz '2020-01-01 00:00 UTC'
    end;
    reached_us bigint := extract(epoch from reached - origin) * 1000000;
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
            ((key >> 20 & 4095) << 51) | pgqueue._since_2020(pgqueue._believed_until(
                began, case when is_round then interval '10 milliseconds' else interval '100 milliseconds' end
            ))
        );
    end if;
end;
$$;

comment on function pgqueue._leave_place(bigint, int, boolean, timestamptz, bigint, timestamptz) is
'Moves the position of a lane to just before this job, or to this moment; with a
new validity where a walk began at the beginning, at began.';

create or replace function pgqueue._look(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, bound timestamptz
)
    returns timestamptz[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    key bigint := hashtextextended(concat(queue, kinds, paused), lane);
    known record := pgqueue._position(key, moment);
    is_round boolean := lane > 500;
    own_priority int := case when is_round then lane - 1000 else lane end;
    between_them timestamptz := timestamptz '1900-01-01 00:00 UTC';
    first timestamptz := case when is_round then timestamptz '-infinity' else between_them end;
    upto timestamptz := case when is_round then between_them else bound end;
    origin timestamptz := case when is_round
        then timestamptz '1800-01-01 00:00 UTC' else timestamptz '2020-01-01 00:00 UTC'
    end;
    start timestamptz := origin + (known.reached >> 12) * interval '1 microsecond';
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
        + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass);
    seen record;
begin
    if (start < case when is_round then upto else moment end) is not true then
        start := first;
        known.last_id := 0;
    elsif start >= upto then
        return null;
    end if;
    select
        array_agg(w.since) filter (where w.since <= bound) as since,
        min(w.at) as at, (array_agg(w.id))[1] as id, count(*) as jobs
    into seen
    from (
        select due.id, due.at, max(due.run_at) over (order by due.at, due.id) as since
        from (
            select j.id, j.run_at, coalesce(j.turn, j.run_at) as at
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_look.queue) and j.queue = _look.queue
                and j.priority = own_priority
                and coalesce(j.turn, j.run_at) <= upto
                and (coalesce(j.turn, j.run_at), j.id) > (start, known.last_id)
                and case
                    when j.lease_expires_at is null then ((j.terms).expires_at <= _look.moment) is not true
                    else j.lease_expires_at <= _look.moment
                end
                and (_look.kinds is null or j.kind = any (_look.kinds))
                and (_look.paused is null or coalesce(
                    _look.paused -> j.group_key -> j.kind, _look.paused -> j.group_key -> '',
                    _look.paused -> '' -> j.kind, _look.paused -> '' -> ''
                ) = 'false')
            order by coalesce(j.turn, j.run_at), j.id
            limit wanted
        ) as due
    ) as w;
    walked := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
        + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass) - walked - 3 * seen.jobs;
    if known.has_expired or start = first and walked > 200 or start > first and walked > 60 then
        if is_round and kinds is null then
            -- What stands before is paused, runs or was served: whatever comes now stands behind.
            perform pgqueue._leave_turn(queue, lane, coalesce(
                seen.at - interval '1 microsecond', pgqueue._last_turn(queue, own_priority)
            ));
        end if;
        upto := case when not is_round then least(bound, moment - interval '10 milliseconds')
            when seen.at is null then pgqueue._turn(queue, lane)
        end;
        perform pgqueue._leave_place(
            key, known.record, is_round, least(seen.at, upto),
            case when (seen.at > upto) is not true then seen.id end,
            case when start = first then began end
        );
    end if;
    return seen.since;
end;
$$;

comment on function pgqueue._look(text, text[], jsonb, int, int, timestamptz, timestamptz) is
'Since when the first jobs of a lane, up to so many, wait that a claim may take,
without those that come after a bound; null for none. Locks nothing. Plans as
claim sets it.';

create or replace function pgqueue._share_by_age(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, age_after interval,
    lanes int[], out served int[], out shares int[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    lane int;
    priority int;
    bound timestamptz;
    seen timestamptz[];
    last_priority int;
    last_since timestamptz;
    seen_in int[] := '{}'::int[];
    seen_since timestamptz[] := '{}'::timestamptz[];
begin
    foreach lane in array lanes loop
        priority := case when lane > 500 then lane - 1000 else lane end;
        bound := case when last_since is null then moment
            else pgqueue._due_by(priority, last_priority, last_since, moment, age_after)
        end;
        -- A round has no bound but the first of it.
        continue when lane > 500 and max_jobs > 1 and last_since is not null
            and pgqueue._look(queue, kinds, paused, lane, 1, moment, bound) is null;
        seen := pgqueue._look(queue, kinds, paused, lane, max_jobs, moment, bound);
        continue when seen is null;
        seen_in := seen_in || array_fill(lane, array[cardinality(seen)]);
        seen_since := seen_since || seen;
        if cardinality(seen) = max_jobs then
            last_priority := priority;
            last_since := seen[max_jobs];
        end if;
    end loop;
    -- All of them, or those of one lane: there is nothing to share.
    if cardinality(seen_in) < max_jobs or seen_in[1] = seen_in[cardinality(seen_in)] then
        return;
    end if;
    select array_agg(s.lane order by s.first), array_agg(s.jobs order by s.first) into served, shares
    from (
        select r.lane, min(r.rank) as first, count(*)::int as jobs
        from (
            select
                w.lane,
                row_number() over (
                    order by
                        pgqueue._aged(
                            w.lane - case when w.lane > 500 then 1000 else 0 end, w.since, moment, age_after
                        ) desc,
                        w.since, w.place
                ) as rank
            from unnest(seen_in, seen_since) with ordinality as w (lane, since, place)
        ) as r
        where r.rank <= max_jobs
        group by r.lane
    ) as s;
end;
$$;

comment on function pgqueue._share_by_age(
    text, text[], jsonb, int, timestamptz, interval, int[]
) is
'How many of its jobs a claim has to take from each lane, by age, and in which
order; null where that makes no difference.';
