-- Turns: groups are served one after the other, whatever waits in each.
--
-- A job of a group that is due gets a turn, and in each lane claims serve jobs in the order of their
-- turns: the round. It is self-clocked fair queueing (Golestani 1994): a turn is one step behind the
-- last of its group, or behind the last that was served, whichever is later; and the step is shorter
-- for a group of greater weight. So each group has as many turns in a stretch of the round as its
-- weight says, a group that was idle neither gains nor loses, and a claim costs what it costs
-- without groups: it meets no job that is not to run next.
--
-- Transactions that add to a group at once do not see each other's jobs. So each holds an advisory lock
-- of the group, shared, and leaves the last turn that it gave in a cell; who finds that others hold the
-- lock goes on from there. Alone, or after a minute, nobody believes the cell: what was rolled back
-- leaves no gap.
--
-- A job that is not due, or came back by a retry, has no turn and stands in its lane by run_at; one
-- whose group has used up its rate has a turn in the time to come. The claim that meets it there once
-- it is due gives it a turn in the round, and serves that instead.

create or replace function pgqueue._turn(queue text, lane int)
    returns timestamptz
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    key bigint := hashtextextended(queue, lane);
    origin timestamptz := timestamptz '1800-01-01 00:00 UTC';
    served bigint := nullif(pg_sequence_last_value(pgqueue._cell((key & 127)::int, 5)), 0)
        # ((key >> 20 & 4095) << 51);
begin
    if served >> 51 = 0 then
        return origin + served * interval '1 microsecond';
    end if;
    return coalesce(
        (
            select j.turn
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_turn.queue) and j.queue = _turn.queue
                and j.priority = lane - 1000
                and coalesce(j.turn, j.run_at) < '1900-01-01 00:00 UTC' and j.lease_expires_at is null
            order by coalesce(j.turn, j.run_at), j.id
            limit 1
        ),
        origin
    );
end;
$$;

comment on function pgqueue._turn(text, int) is
'The last turn that was served in a round; where that is not known, the first
that waits.';

create or replace function pgqueue._last_turn(queue text, priority int)
    returns timestamptz
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
as $$
begin
    return (
        select j.turn
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(_last_turn.queue) and j.queue = _last_turn.queue
            and j.priority = _last_turn.priority
            and coalesce(j.turn, j.run_at) < '1900-01-01 00:00 UTC'
        order by coalesce(j.turn, j.run_at) desc, j.id desc
        limit 1
    );
end;
$$;

comment on function pgqueue._last_turn(text, int) is 'The last turn in the round of a lane.';

create or replace function pgqueue._leave_turn(queue text, lane int, served timestamptz)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    key bigint := hashtextextended(queue, lane);
    tag bigint := (key >> 20 & 4095) << 51;
    cell regclass := pgqueue._cell((key & 127)::int, 5);
    served_us bigint := (date_part('epoch', served) * 1000000)::bigint + 5364662400000000;
    known bigint := nullif(pg_sequence_last_value(cell), 0) # tag;
begin
    if served is not null and (known >> 51 = 0 and known >= served_us) is not true then
        perform setval(cell, tag | served_us);
    end if;
end;
$$;

comment on function pgqueue._leave_turn(text, int, timestamptz) is
'Lets all sessions know the last turn that was served in a round.';

create or replace function pgqueue._next_turn(
    queue text, priority int, group_key text, served timestamptz, weight int, jobs int default 1
)
    returns timestamptz
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    key bigint := hashtextextended(concat(queue, ' ', group_key), priority);
    tag bigint := (key >> 20 & 4095) << 51;
    cell regclass := ('pgqueue._cell_' || 768 + 2 * (key & 127))::regclass;
    set_at regclass := ('pgqueue._cell_' || 769 + 2 * (key & 127))::regclass;
    now_us bigint := pgqueue._since_2020(clock_timestamp());
    -- As many as a transaction may hold where nothing else is configured.
    fold int := key & 63;
    origin timestamptz := timestamptz '1800-01-01 00:00 UTC';
    in_flight bigint;
    given timestamptz;
begin
    if (
        pg_try_advisory_xact_lock_shared(7366515, fold)
        and pg_try_advisory_lock(7366515, fold)
        and pg_advisory_unlock(7366515, fold)
    ) is not true and pg_sequence_last_value(set_at) between now_us - 60000000 and now_us + 60000000 then
        in_flight := nullif(pg_sequence_last_value(cell), 0) # tag;
    end if;
    -- Rounded up or down at random, so that the step is right on average.
    given := interval '1 microsecond' * floor(100.0 / coalesce(weight, 1) + random()) + greatest(
        served,
        case when in_flight >> 51 = 0 then origin + in_flight * interval '1 microsecond' end,
        (
            select j.turn
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_next_turn.queue) and isfinite(j.turn)
                and hashtext(j.group_key) = hashtext(_next_turn.group_key)
                and j.priority = _next_turn.priority
                and j.turn > served and j.turn < '1900-01-01 00:00 UTC'
                and j.queue = _next_turn.queue and j.group_key = _next_turn.group_key
            order by j.turn desc
            limit 1
        )
    );
    perform setval(cell, tag | (date_part(
        'epoch', given + (jobs - 1) * interval '100 microseconds' / coalesce(weight, 1)
    ) * 1000000)::bigint + 5364662400000000);
    perform setval(set_at, now_us);
    return given;
end;
$$;

comment on function pgqueue._next_turn(text, int, text, timestamptz, int, int) is
'The next turn of a group of this weight (null: 1) in a lane in which this one
was served last; with jobs, the first of so many.';

create or replace function pgqueue._next_turns(queue text, priority int, group_keys text[])
    returns timestamptz[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    served timestamptz := pgqueue._turn(queue, priority + 1000);
    is_configured boolean := pg_relation_size('pgqueue.queue') > 0;
begin
    return array(
        with next as materialized (
            select
                d.group_key, d.weight,
                pgqueue._next_turn(queue, priority, d.group_key, served, d.weight, d.jobs) as turn
            from (
                select
                    u.group_key, count(*)::int as jobs,
                    case when is_configured
                        then (pgqueue._in_force(queue, '', u.group_key)).weight
                        else 1
                    end as weight
                from unnest(group_keys) as u (group_key)
                where u.group_key is not null
                group by u.group_key
            ) as d
        )
        select n.turn + (row_number() over (partition by g.group_key order by g.place) - 1)
            * interval '100 microseconds' / n.weight
        from unnest(group_keys) with ordinality as g (group_key, place)
        left join next as n on n.group_key = g.group_key
        order by g.place
    );
end;
$$;

comment on function pgqueue._next_turns(text, int, text[]) is
'The next turns of some groups, one for each time that one is named; null for
null.';

create or replace function pgqueue._serve_newcomers(
    queue text, kinds text[], paused jsonb, lane int, wanted int, picks tid[], moment timestamptz,
    is_whole boolean, taken tid[]
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    batch int := 10 * wanted;
    others tid[] := '{}'::tid[];
    served tid[] := '{}'::tid[];
    first record;
    newcomers record;
    turns timestamptz[];
begin
    loop
        others := others || array(
            select p.tid
            from unnest(picks) with ordinality as p (tid, place)
            join pgqueue.job as j on j.ctid = p.tid
            where j.group_key is null
            order by p.place
        );
        select p.at, p.id into first
        from (
            select coalesce(j.turn, j.run_at) as at, j.id, j.group_key
            from pgqueue.job as j
            where j.ctid = any (picks)
            -- The rest would bring in the index of all jobs that have a group.
            offset 0
        ) as p
        where p.group_key is not null
        order by p.at, p.id
        limit 1;
        exit when not found;
        select array_agg(n.tid) as tids, array_agg(n.group_key) as group_keys
        into newcomers
        from (
            select j.ctid as tid, j.group_key
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_serve_newcomers.queue) and j.queue = _serve_newcomers.queue
                and j.priority = lane
                and coalesce(j.turn, j.run_at) <= moment
                and (coalesce(j.turn, j.run_at), j.id) >= (first.at, first.id)
                and j.group_key is not null and j.lease_expires_at is null
                and ((j.terms).expires_at <= moment) is not true
                and (_serve_newcomers.kinds is null or j.kind = any (_serve_newcomers.kinds))
                and (_serve_newcomers.paused is null or coalesce(
                    _serve_newcomers.paused -> j.group_key -> j.kind,
                    _serve_newcomers.paused -> j.group_key -> '',
                    _serve_newcomers.paused -> '' -> j.kind, _serve_newcomers.paused -> '' -> ''
                ) = 'false')
            order by coalesce(j.turn, j.run_at), j.id
            limit least(batch, greatest(wanted, 1000))
            for update skip locked
        ) as n;
        turns := pgqueue._next_turns(queue, lane, newcomers.group_keys);
        update pgqueue.job as j
        set turn = n.turn
        from unnest(newcomers.tids, turns) as n (tid, turn)
        where j.ctid = n.tid;
        perform pgqueue._list_lane(queue, 1000 + lane);
        exit when cardinality(others) = wanted;
        served := served || pgqueue._pick_round(
            queue, kinds, paused, lane + 1000, wanted - cardinality(others) - cardinality(served),
            moment, is_whole, taken || served
        );
        exit when cardinality(others) + cardinality(served) = wanted
            -- The next claim goes on.
            or clock_timestamp() > moment + interval '100 milliseconds';
        -- The groups of these are full. What stands behind them?
        batch := least(10 * batch, 1000);
        picks := array(
            select j.ctid
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_serve_newcomers.queue) and j.queue = _serve_newcomers.queue
                and j.priority = lane
                and coalesce(j.turn, j.run_at) <= moment
                and (coalesce(j.turn, j.run_at), j.id) > ('1900-01-01 00:00 UTC', 0)
                and j.lease_expires_at is null and ((j.terms).expires_at <= moment) is not true
                and j.ctid <> all (others)
                and (_serve_newcomers.kinds is null or j.kind = any (_serve_newcomers.kinds))
                and (_serve_newcomers.paused is null or coalesce(
                    _serve_newcomers.paused -> j.group_key -> j.kind,
                    _serve_newcomers.paused -> j.group_key -> '',
                    _serve_newcomers.paused -> '' -> j.kind, _serve_newcomers.paused -> '' -> ''
                ) = 'false')
            order by coalesce(j.turn, j.run_at), j.id
            limit wanted - cardinality(others) - cardinality(served)
            for update skip locked
        );
    end loop;
    return others || served;
end;
$$;

comment on function pgqueue._serve_newcomers(
    text, text[], jsonb, int, int, tid[], timestamptz, boolean, tid[]
) is
'Gives turns to those of the picked jobs that have a group and none yet, and to
the next of their lane, ten for each job wanted, and picks from the round
in their place; where their groups are full, what stands behind them.';

create or replace function pgqueue._renew_turns(queue text, kind text, group_key text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    lane record;
    served timestamptz;
begin
    for lane in
        select
            w.queue, w.priority, array_agg(w.ctid order by w.turn, w.id) as picks,
            array_agg(w.group_key order by w.turn, w.id) as group_keys
        from (
            select j.ctid, j.id, j.queue, j.priority, j.turn, j.group_key
            from pgqueue.job as j
            where j.turn is not null and j.lease_expires_at is null
                and (_renew_turns.queue is null
                    or hashtext(j.queue) = hashtext(_renew_turns.queue) and j.queue = _renew_turns.queue)
                and (_renew_turns.kind is null or j.kind = _renew_turns.kind)
                and (_renew_turns.group_key is null
                    or hashtext(j.group_key) = hashtext(_renew_turns.group_key)
                        and j.group_key = _renew_turns.group_key)
            for update skip locked
        ) as w
        group by w.queue, w.priority
    loop
        served := pgqueue._turn(lane.queue, lane.priority + 1000);
        with own as materialized (
            select u.group_key, (pgqueue._in_force(lane.queue, '', u.group_key)).weight
            from (select distinct k.group_key from unnest(lane.group_keys) as k (group_key)) as u
        ), renewed as (
            select
                p.tid,
                served + row_number() over (partition by p.group_key order by p.place)
                    * interval '100 microseconds' / o.weight as turn
            from unnest(lane.picks, lane.group_keys) with ordinality as p (tid, group_key, place)
            join own as o on o.group_key = p.group_key
        )
        update pgqueue.job as j
        set turn = r.turn
        from renewed as r
        where j.ctid = r.tid;
    end loop;
end;
$$;

comment on function pgqueue._renew_turns(text, text, text) is
'For a kind or group that was paused: gives its jobs turns behind the last that
was served, or they would come before all that were not paused.';
