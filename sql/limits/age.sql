-- Ageing: for each age_after a waiting job counts as one priority higher, so that none starves.
--
-- Ageing writes nothing: the order within a lane stays the same, so only the lanes have to be compared. A
-- claim looks, without locking, at the first jobs of each lane, from the position that module pick has left. In
-- a lower lane it looks only at jobs that have waited long enough to come before those of the lanes above.
-- Then each lane gets a share of the claim, which _pick takes. If other sessions took some of these jobs
-- meanwhile, it takes the next ones of the same lane, and the rest by priority.
--
-- In a lane of groups a job is served when its group's turn comes, so it counts as waiting only since the
-- latest run_at among those served before it.

-- The effective priority of a job that has been due since run_at; its own if nothing ages.
create or replace function pgqueue._aged(priority int, run_at timestamptz, moment timestamptz, age_after interval)
    returns float8
    language sql
    immutable
as $$
    select priority + coalesce(floor(date_part('epoch', moment - run_at) / date_part('epoch', age_after)), 0)
$$;

-- The latest run_at with which a job of priority is served before, or at the same time as, a job of priority
-- other that has been due since run_at.
create or replace function pgqueue._due_by(
    priority int, other int, run_at timestamptz, moment timestamptz, age_after interval
)
    returns timestamptz
    language plpgsql
    immutable
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

-- The run_at of the first jobs of a lane that a claim may take, at most the wanted number and none later than
-- bound; null for none. Locks nothing. Relies on the planner settings of claim and _share_by_age.
create or replace function pgqueue._look(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, bound timestamptz
)
    returns timestamptz[]
    language plpgsql
as $$
declare
    key bigint := hashtextextended(concat(queue, kinds, paused) collate "default", lane);
    known record := pgqueue._position(key, moment);
    first timestamptz := '-infinity'::timestamptz;
    start timestamptz := timestamptz '2020-01-01 00:00 UTC' + (known.reached >> 12) * interval '1 microsecond';
    start_id bigint := known.last_id;
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
        + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass);
    seen record;
begin
    if (start < moment) is not true then
        start := first;
        start_id := 0;
    elsif start >= bound then
        return null;
    end if;
    select
        array_agg(w.run_at) filter (where w.run_at <= bound) as since,
        min(w.run_at) as at, (array_agg(w.id))[1] as id, count(*) as jobs
    into seen
    from (
        select j.id, j.run_at
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, _look.queue, lane)
            and j.run_at <= bound
            and (j.run_at, j.id) > (start, start_id)
            and case
                when j.lease_expires_at is null then ((j.terms).expires_at <= _look.moment) is not true
                else j.lease_expires_at <= _look.moment
            end
            and pgqueue._is_wanted(j.kind, j.group_key, _look.kinds, _look.paused)
        order by j.run_at, j.id
        limit wanted
    ) as w;
    walked := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
        + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass) - walked - 3 * seen.jobs;
    if known.has_expired or start = first and walked > 200 or start > first and walked > 60 then
        bound := least(bound, moment - interval '10 milliseconds');
        perform pgqueue._leave_position(
            key, known.record, known.reached, pgqueue._since_2020(least(seen.at, bound)),
            case when (seen.at > bound) is not true then seen.id - 1 end,
            case when start = first
                then pgqueue._since_2020(pgqueue._believed_until(began, interval '100 milliseconds'))
            end
        );
    end if;
    return seen.since;
end;
$$;

-- _look for a lane of groups, in the order of their turns. Relies on the same planner settings.
create or replace function pgqueue._look_at_groups(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, bound timestamptz
)
    returns timestamptz[]
    language plpgsql
    set enable_bitmapscan = off
as $$
begin
    return (
        select array_agg(s.since order by s.since) filter (where s.since <= bound)
        from (
            select max(h.run_at) over (order by h.nth, t.at) as since
            from (
                select n.*, ceil(wanted::float8 / count(*) over ())::int as each
                from (
                    select t.at, t.group_key, pgqueue._start_of(t, moment) as start
                    from pgqueue.ticket as t
                    where pgqueue._is_ticket_in(t, _look_at_groups.queue, lane - 1000) and t.at <= moment
                    order by t.at
                    limit wanted
                ) as n
            ) as t
            cross join lateral (
                select o.run_at, row_number() over (order by o.run_at, o.id) as nth
                from (
                    select j.run_at, j.id
                    from pgqueue.job as j
                    where pgqueue._is_in_group(j, _look_at_groups.queue, t.group_key)
                        and -j.priority = 1000 - lane
                        and j.run_at between t.start and moment
                        and case
                            when j.lease_expires_at is null
                                then ((j.terms).expires_at <= _look_at_groups.moment) is not true
                            else j.lease_expires_at <= _look_at_groups.moment
                        end
                        and pgqueue._is_wanted(j.kind, j.group_key, _look_at_groups.kinds, _look_at_groups.paused)
                    order by j.run_at, j.id
                    limit t.each
                ) as o
            ) as h
            order by h.nth, t.at
            limit wanted
        ) as s
    );
end;
$$;

-- How many jobs a claim has to take from each lane by age, and in which order; null if age makes no difference.
create or replace function pgqueue._share_by_age(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, age_after interval,
    lanes int[], out served int[], out shares int[]
)
    language plpgsql
    set enable_sort = off
    set enable_indexscan = on
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
        seen := case when lane > 500
            then pgqueue._look_at_groups(queue, kinds, paused, lane, max_jobs, moment, bound)
            else pgqueue._look(queue, kinds, paused, lane, max_jobs, moment, bound)
        end;
        continue when seen is null;
        seen_in := seen_in || array_fill(lane, array[cardinality(seen)]);
        seen_since := seen_since || seen;
        if cardinality(seen) = max_jobs then
            last_priority := priority;
            last_since := seen[max_jobs];
        end if;
    end loop;
    -- It takes all that there are, or only those of one lane: nothing to share.
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
