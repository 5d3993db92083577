-- The pick: which jobs are due, in order, locked, however deep the queue. Only claim()
-- comes here.
--
-- A lane is walked from its start. Jobs that run, and index entries of finished jobs
-- that some old snapshot keeps from being removed, stand in front and are walked over
-- each time. While that is cheap nothing else happens. Whenever a walk has read far more
-- pages than its jobs account for, the session notes in a custom setting, the mark, up
-- to where each lane is empty, and starts there. Work that appears behind the mark (a
-- late commit, a release, an expired lease) is found by the next full walk, which comes
-- after 20 times the duration of the last: at most 5 % of the time goes into full walks.
-- The mark costs no table, no bloat, and is safe to lose.
create or replace function pgqueue._set_mark(
    mark pgqueue._mark, walked int, last_pick tid, remembered int[], moment timestamptz
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
declare
    -- An enqueue that commits within this time is never behind the mark.
    horizon timestamptz := moment - interval '100 milliseconds';
begin
    -- The lane that filled the claim is empty up to the last job taken, the lanes above
    -- it up to the horizon. Lanes without a job are remembered: they may get one.
    select array_agg(l.lane order by l.lane desc),
        array_agg(l.run_at order by l.lane desc),
        array_agg(l.id order by l.lane desc)
    into mark.lanes, mark.run_ats, mark.ids
    from (
        select
            k.lane,
            case when k.is_filled then p.run_at when k.is_empty then horizon else k.run_at end,
            case when k.is_filled then p.id when k.is_empty then 9223372036854775807 else k.id end
        from (
            select
                u.lane, u.run_at, u.id,
                u.place = walked and last_pick is not null as is_filled,
                u.place <= walked and coalesce(u.run_at < horizon, true) as is_empty
            from unnest(mark.lanes, mark.run_ats, mark.ids) with ordinality
                as u (lane, run_at, id, place)
        ) as k
        left join pgqueue.job as p on p.ctid = last_pick and k.is_filled
        union all
        select r.lane, horizon, 9223372036854775807
        from (select 0 union select * from unnest(remembered)) as r (lane)
        where r.lane <> all (mark.lanes)
            and (mark.is_complete or r.lane > any (mark.lanes))
    ) as l (lane, run_at, id);

    mark.valid_until := coalesce(
        mark.valid_until,
        clock_timestamp() + least(20 * (clock_timestamp() - moment), interval '1 minute')
    );
    perform set_config('pgqueue.mark_' || (hashtext(mark.queue) & 63), mark::text, false);
end;
$$;

comment on function pgqueue._set_mark(pgqueue._mark, int, tid, int[], timestamptz) is
'Keeps, for this session, up to where a pick found the lanes of a queue empty.';

create or replace function pgqueue._pick(
    queue text, kinds text[], max_jobs int, moment timestamptz
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Folded, so that a session that works through many queues keeps few settings.
    noted text := current_setting('pgqueue.mark_' || (hashtext(queue) & 63), true);
    mark pgqueue._mark;
    is_marked boolean := false;
    remembered int[];
    lanes int[] := '{}'::int[];
    is_complete boolean := false;
    -- The pages of job that this session has read: a measure of the walk that depends
    -- neither on the machine nor on the moment.
    pages bigint := pg_stat_get_xact_blocks_fetched('pgqueue.job'::regclass)
        + pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass);
    wanted int := max_jobs;
    place int := 0;
    lane int;
    above bigint := 2147483648;
    from_run_at timestamptz;
    from_id bigint;
    found_jobs tid[];
    has_expired boolean;
    picks tid[] := '{}'::tid[];
begin
    if noted <> '' then
        mark := noted::pgqueue._mark;
        if mark.queue = queue and mark.kinds is not distinct from kinds then
            remembered := mark.lanes;
            is_marked := mark.valid_until > moment
                and mark.valid_until <= moment + interval '1 minute';
        end if;
        if is_marked then
            lanes := mark.lanes;
            is_complete := mark.is_complete;
        else
            mark := null;
        end if;
    end if;

    while wanted > 0 loop
        place := place + 1;
        if is_marked then
            lane := lanes[place];
            from_run_at := mark.run_ats[place];
            from_id := mark.ids[place];
        end if;
        if lane is null then
            exit when is_complete;
            -- Lane 0 is walked without asking whether it exists: to ask for the highest
            -- lane reads a page full of the jobs in it, to ask for one above 0 does not.
            lane := coalesce(
                (
                    select j.priority
                    from pgqueue.job as j
                    where hashtext(j.queue) = hashtext(_pick.queue)
                        and j.priority < above
                        and j.priority > case when above > 0 then 0 else -2147483649 end
                    order by j.priority desc
                    limit 1
                ),
                case when above > 0 then 0 end
            );
            is_complete := lane is null;
            exit when is_complete;
            lanes := lanes || lane;
        end if;

        loop
            select array_agg(due.tid), bool_or(due.is_leased)
            into found_jobs, has_expired
            from (
                select j.ctid as tid, j.lease_expires_at is not null as is_leased
                from pgqueue.job as j
                where hashtext(j.queue) = hashtext(_pick.queue) and j.queue = _pick.queue
                    and j.priority = lane
                    and j.run_at <= _pick.moment
                    and (j.run_at, j.id) > (coalesce(from_run_at, '-infinity'), coalesce(from_id, 0))
                    and (j.lease_expires_at is null or j.lease_expires_at <= _pick.moment)
                    and (_pick.kinds is null or j.kind = any (_pick.kinds))
                order by j.run_at, j.id
                limit wanted
                for update skip locked
            ) as due;
            exit when has_expired is not true;
            -- Those that come back are found where they stood.
            perform pgqueue._expire(found_jobs, moment);
        end loop;
        picks := picks || found_jobs;
        wanted := max_jobs - cardinality(picks);
        above := lane;
        lane := null;
    end loop;

    pages := pg_stat_get_xact_blocks_fetched('pgqueue.job'::regclass)
        + pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass) - pages;
    if pages > 16 + 3 * max_jobs then
        perform pgqueue._set_mark(
            row(
                queue, kinds, mark.valid_until, is_complete, lanes, mark.run_ats, mark.ids
            )::pgqueue._mark,
            place, picks[max_jobs],
            remembered, moment
        );
    end if;
    return picks;
end;
$$;

comment on function pgqueue._pick(text, text[], int, timestamptz) is
'Locks up to max_jobs due jobs of a queue and returns where they are, in the order in which they run; ends the attempts of those whose lease expired on the way. Plans as claim sets it.';
