-- The pick: finds and locks the due jobs for claim(), in order, however deep the queue is.
--
-- A claim walks a lane from its beginning. Before the ready jobs it meets those that are running, those that other
-- sessions are claiming, and index entries of finished jobs that an old snapshot keeps from being removed. While these
-- are few, nothing else happens. A walk that has crossed many of them leaves a position for all sessions: the run_at
-- up to which the jobs of the lane have been taken. From then on claims start there. Each moves the position to its
-- last pick at once, before it commits, so that the next one crosses none of the same rows; a claim of one job does so
-- only if its walk was longer than usual. After 100 ms, or 20 times the duration of that walk, one claim walks from
-- the beginning again and finds what was left before the position: late commits, releases, expired leases, claims that
-- were rolled back. A claim that finds nothing from the position on walks from the beginning before it says so. The
-- exception is a filtered claim, one that asks for some kinds only or has to pass over jobs that are paused or at a
-- cap: it might cross any number of jobs, so it trusts what a long walk has found, and looks only at the last second.
-- Positions are kept in the cells of module lane.

-- The walk of _pick if it has to leave out more than other kinds: what is paused or at a cap, jobs that this
-- claim has already taken, or what a recovery has left. Separate, because preparing its conditions in each call
-- would cost a plain claim a tenth.
create or replace function pgqueue._filtered_walk(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz,
    start timestamptz, start_id bigint, taken tid[], has_recovered boolean,
    out picks tid[], out last timestamptz, out may_be_over boolean
)
    language plpgsql
as $$
begin
    select
        array_agg(due.tid), max(due.run_at), bool_or(due.may_be_over)
    into picks, last, may_be_over
    from (
        select
            j.ctid as tid,
            j.run_at,
            j.lease_expires_at is not null or (j.terms).expires_at is not null as may_be_over
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, _filtered_walk.queue, _filtered_walk.lane)
            and j.run_at <= _filtered_walk.moment
            and (j.run_at, j.id) > (start, start_id)
            -- After a recovery, take of what has expired only the leases that it did not reach, whose jobs will
            -- come back; what would be cancelled or dead is left to another claim.
            and case
                when coalesce(j.lease_expires_at, (j.terms).expires_at) <= _filtered_walk.moment
                    then has_recovered is not true or j.lease_expires_at is not null
                        and j.attempt < j.max_attempts and j.cancelled_at is null
                else j.lease_expires_at is null
            end
            and pgqueue._is_wanted(j.kind, j.group_key, _filtered_walk.kinds, _filtered_walk.paused)
            and (taken is null or j.ctid <> all (taken))
        order by j.run_at, j.id
        limit wanted
        for update skip locked
    ) as due;
end;
$$;

-- For a filtered claim under a statement_timeout: passes over jobs that it may not take, 10,000 at a time, and leaves
-- the position after each step, so that the next claim continues there if this one is cancelled. It stops before a
-- step in which there is any job, and then wants no more than that has. Relies on the planner settings of _pick.
create or replace function pgqueue._skip_unwanted(
    queue text, kinds text[], paused jsonb, lane int, key bigint, record int, moment timestamptz,
    inout wanted int, inout start timestamptz, inout start_id bigint, out has_skipped boolean
)
    language plpgsql
as $$
declare
    began timestamptz := clock_timestamp();
    is_whole boolean := start = '-infinity';
    step record;
begin
    has_skipped := false;
    loop
        with looked as materialized (
            select
                j.run_at, j.id,
                (j.lease_expires_at <= _skip_unwanted.moment) is not false
                    and pgqueue._is_wanted(j.kind, j.group_key, _skip_unwanted.kinds, _skip_unwanted.paused) as is_wanted
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, _skip_unwanted.queue, _skip_unwanted.lane)
                and j.run_at <= _skip_unwanted.moment and (j.run_at, j.id) > (start, start_id)
            order by j.run_at, j.id
            limit 10000
        )
        select f.found, l.run_at, l.id
        into step
        from (select count(*)::int as found from (select from looked as l where l.is_wanted limit wanted) as w) as f
        left join lateral (select l.run_at, l.id from looked as l where f.found = 0 offset 9999) as l on true;
        exit when step.run_at is null;
        has_skipped := true;
        start := step.run_at;
        start_id := step.id;
        perform pgqueue._leave_position(
            key, record, null, pgqueue._since_2020(start), start_id,
            case when is_whole then pgqueue._since_2020(clock_timestamp() + interval '59 seconds') end
        );
    end loop;
    wanted := coalesce(nullif(step.found, 0), wanted);
    if is_whole and has_skipped then
        perform pgqueue._leave_position(
            key, record, null, pgqueue._since_2020(start), start_id,
            pgqueue._since_2020(pgqueue._believed_until(began, '100 milliseconds'))
        );
    end if;
end;
$$;

-- Locks at most the wanted number of due jobs of one lane, except those in taken, and returns where they are, in the
-- order in which to run them. As a side effect ends expired leases and jobs past their expires_at. An empty answer
-- means that there is no job only if it walked from the beginning (is_whole). Relies on the planner settings of claim.
create or replace function pgqueue._pick(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, is_whole boolean,
    taken tid[] default null
)
    returns tid[]
    language plpgsql
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    -- Each filter has a position of its own: a claim that passes over a job must not hide it from
    -- claims that may take it.
    key bigint := hashtextextended(concat(queue, kinds, paused) collate "default", lane);
    tag bigint := (key >> 20 & 4095) << 51;
    record int := (key & 15) * 2;
    valid_until bigint := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
    now_us bigint;
    -- A claim of one job that crosses no more than this leaves no position; -1 if it walks from the
    -- beginning on behalf of the others.
    few int := 63;
    position bigint;
    first timestamptz := '-infinity'::timestamptz;
    start timestamptz := first;
    start_id bigint := 0;
    began timestamptz;
    walked bigint;
    reached bigint;
    picks tid[];
    last timestamptz;
    may_be_over boolean;
    over_at timestamptz;
    has_recovered boolean;
    has_skipped boolean;
begin
    if valid_until is not null then
        -- If the first record belongs to another lane, use the second; if that does too, none.
        if valid_until >> 51 > 0 then
            record := (key >> 4 & 15) * 2;
            valid_until := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
            if valid_until >> 51 > 0 then
                valid_until := 0;
                record := null;
            end if;
        end if;
        if valid_until > 0 then
            position := pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass);
        end if;
        if valid_until > 0 and (not is_whole or valid_until & 1 = 1 and num_nonnulls(kinds, paused) > 0) then
            now_us := pgqueue._since_2020(moment);
            if valid_until between now_us and now_us + 60000000 then
                start := timestamptz '2020-01-01 00:00 UTC' + (position >> 12) * interval '1 microsecond';
                if is_whole then
                    start := least(start, moment - interval '1 second');
                elsif position & 4095 > 0 then
                    start_id := pg_sequence_last_value(('pgqueue._cell_tie_' || (key & 3))::regclass);
                end if;
                if (start < moment) is not true then
                    start := first;
                    position := null;
                end if;
                if (start_id % 4095 + 1 = position & 4095) is not true then
                    start_id := 0;
                end if;
            elsif valid_until between now_us - 1000000 and now_us then
                -- This claim walks from the beginning; meanwhile the others still start at the position.
                few := -1;
                perform setval(
                    ('pgqueue._cell_' || record)::regclass,
                    tag | case when valid_until & 1 = 1 then now_us + 1000000 | 1 else now_us + 100000 & -2 end
                );
            end if;
        end if;
    end if;

    if num_nonnulls(kinds, paused) > 0 and current_setting('statement_timeout') <> '0' then
        select s.* into wanted, start, start_id, has_skipped
        from pgqueue._skip_unwanted(queue, kinds, paused, lane, key, record, moment, wanted, start, start_id) as s;
    end if;

    loop
        began := clock_timestamp();
        walked := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
            + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass);
        -- The same walk twice; the second is the plain one: see _filtered_walk.
        if has_recovered or num_nonnulls(paused, taken) > 0 then
            select w.* into picks, last, may_be_over
            from pgqueue._filtered_walk(
                queue, kinds, paused, lane, wanted, moment, start, start_id, taken, has_recovered
            ) as w;
        else
            select
                array_agg(due.tid), max(due.run_at), bool_or(due.may_be_over)
            into picks, last, may_be_over
            from (
                select
                    j.ctid as tid,
                    j.run_at,
                    -- "May be", because comparing it with the moment would cost a claim of one job half a percent.
                    j.lease_expires_at is not null or (j.terms).expires_at is not null as may_be_over
                from pgqueue.job as j
                where pgqueue._is_in_lane(j, _pick.queue, lane)
                    and j.run_at <= _pick.moment
                    and (j.run_at, j.id) > (start, start_id)
                    and (j.lease_expires_at <= _pick.moment) is not false
                    and (_pick.kinds is null or j.kind = any (_pick.kinds))
                order by j.run_at, j.id
                limit wanted
                for update skip locked
            ) as due;
        end if;
        if may_be_over then
            select min(j.run_at) into over_at
            from pgqueue.job as j
            where j.ctid = any (picks) and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _pick.moment;
            if over_at is not null then
                -- Walk again: jobs that come back are at the same place as before.
                perform pgqueue._recover(queue, lane, picks, over_at, moment);
                has_recovered := true;
                continue;
            end if;
        end if;
        exit when start = first or cardinality(picks) = wanted or picks is null
            -- Fewer than wanted will do if a walk from the beginning is expensive.
            or valid_until > now_us + 100000 or has_skipped;
        start := first;
        start_id := 0;
    end loop;

    -- Index entries and pages that it crossed: a measure that depends neither on the machine nor on its load.
    walked := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
        + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass) - walked;
    -- A short walk for one job leaves no position.
    if wanted = 1 and walked <= few then
        return coalesce(picks, '{}'::tid[]);
    end if;
    walked := walked - 3 * coalesce(cardinality(picks), 0);
    if start = first and walked > 200
            and (picks is not null or clock_timestamp() > began + interval '5 milliseconds')
        or start > first and picks is not null and (wanted > 1 or walked > 60)
    then
        -- So that a job whose enqueue commits within 10 ms is never before the position.
        last := least(case when cardinality(picks) = wanted then last end, moment - interval '10 milliseconds');
        reached := pgqueue._since_2020(last);
        perform pgqueue._leave_position(
            key, record, position, reached,
            case when reached = position >> 12 then (select j.id from pgqueue.job as j where j.ctid = picks[wanted]) end,
            case when start = first then pgqueue._since_2020(
                -- There may be more that has expired.
                case when has_recovered then clock_timestamp() + interval '100 milliseconds'
                    else pgqueue._believed_until(began, interval '100 milliseconds')
                end
            ) end
        );
    elsif few < 0 and picks is not null then
        -- It found jobs near the beginning, so the others start there as well.
        perform setval(('pgqueue._cell_' || record)::regclass, tag);
    end if;
    return coalesce(picks, '{}'::tid[]);
end;
$$;

-- Calls _pick or _pick_groups for the listed lanes of a queue: first each lane's share by age, then the highest
-- priority first. If that finds nothing, or no list is valid, walks all lanes with a due job from their beginning.
create or replace function pgqueue._pick_lanes(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, noted int[],
    settings pgqueue.queue_in_force, inout new_token bigint, out picks tid[], out job_of bigint[], out permits tid[]
)
    language plpgsql
as $$
declare
    live int[];
    served int[];
    shares int[];
    lanes int[];
    lane int;
    walked int[] := '{}'::int[];
    wanted int;
    is_whole boolean := false;
    taken tid[];
    of_groups record;
begin
    picks := '{}';
    if settings.age_after is not null and -1000 = any (noted) then
        -- Ageing compares all lanes, so an incomplete list will not do.
        noted := null;
    end if;
    if noted is null then
        live := pgqueue._due_lanes(queue, moment);
    end if;
    if settings.age_after is not null then
        select s.served, s.shares into served, shares
        from pgqueue._share_by_age(
            queue, kinds, paused, max_jobs, moment, settings.age_after, coalesce(noted, live)
        ) as s;
    end if;
    loop
        lanes := served || coalesce(noted, live);
        for place in 1 .. cardinality(lanes) loop
            lane := lanes[place];
            exit when lane = -1000;
            -- _pick_groups has come to the end of it and found nothing.
            continue when is_whole and lane > 500 and lane = any (walked);
            wanted := least(shares[place], max_jobs - cardinality(picks));
            -- A lane may come twice, once for its share by age.
            taken := case when served is not null then nullif(picks, '{}') end;
            if lane > 500 then
                of_groups := pgqueue._pick_groups(
                    queue, kinds, paused, lane, wanted, moment, is_whole,
                    -- A list may be older than a job of a higher priority.
                    noted is null and lane >= all (live), settings, taken, new_token
                );
                new_token := of_groups.new_token;
                picks := picks || of_groups.picks;
                job_of := job_of || of_groups.job_of;
                permits := permits || of_groups.permits;
            else
                picks := picks || pgqueue._pick(queue, kinds, paused, lane, wanted, moment, is_whole, taken);
            end if;
            exit when cardinality(picks) = max_jobs;
        end loop;
        exit when is_whole or cardinality(picks) = max_jobs or picks <> '{}' and (-1000 = any (noted)) is not true;
        walked := walked || lanes;
        live := coalesce(live, pgqueue._due_lanes(queue, moment));
        if -1000 = any (noted) then
            -- Next, the lanes for which the list had no room.
            noted := array(
                select l.lane from unnest(live) with ordinality as l (lane, place)
                where l.lane <> all (noted) order by l.place
            );
            continue;
        end if;
        noted := null;
        served := null;
        shares := null;
        is_whole := true;
    end loop;
    if live is not null and (picks <> '{}' or clock_timestamp() > moment + interval '5 milliseconds') then
        perform pgqueue._note_lanes(queue, live, moment);
    end if;
end;
$$;

-- _pick_capped in its usual case: the queue's only cap is that of the queue itself, and permits are free. Returns
-- null if none is, or more are held than the cap allows. Relies on the planner settings of claim.
create or replace function pgqueue._pick_under_cap(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, settings pgqueue.queue_in_force,
    cap pgqueue._cap, new_token bigint, out picks tid[], out job_of bigint[], out permits tid[]
)
    language plpgsql
as $$
declare
    now_us bigint := pgqueue._since_2020(moment);
    since timestamptz;
    room int;
    of_lanes record;
    locked tid[];
    ids bigint[];
    own_permit tid;
begin
    if (pg_sequence_last_value('pgqueue._cell_groups_due'::regclass) between now_us and now_us + 60000000) is not true then
        perform pgqueue._sweep_groups_if_due(moment, new_token);
    end if;
    if pg_relation_size('pgqueue.permit_surplus_idx') > 8192 and pgqueue._any_surplus(queue) then
        return;
    end if;
    -- First permits that have been taken before, or the index look-up would read all the unused ones as well.
    foreach since in array array['2000-01-01 UTC', '-infinity']::timestamptz[] loop
        room := (
            select count(*)
            from (
                select
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, _pick_under_cap.queue, '', '')
                    and pgqueue._is_free(p, cap.is_rate, cap.most, moment) and p.free_at >= since
                -- The last returned first: an old snapshot may keep dead index entries behind them.
                order by p.free_at desc
                limit max_jobs
            ) as f
        );
        exit when room = max_jobs;
    end loop;
    if room = 0 then
        return;
    end if;
    if pg_sequence_last_value('pgqueue.lanes_seq'::regclass) >> (hashtext(queue collate "default") & 63) & 1 = 0 then
        picks := pgqueue._pick(queue, kinds, paused, 0, room, moment, false);
    end if;
    if (picks = '{}') is not false then
        of_lanes := pgqueue._pick_lanes(
            queue, kinds, paused, room, moment, pgqueue._noted_lanes(queue, moment), settings, new_token
        );
        picks := of_lanes.picks;
        if picks = '{}' then
            return;
        end if;
        job_of := of_lanes.job_of;
        permits := of_lanes.permits;
    end if;
    if permits is null and cardinality(picks) = 1 then
        -- In one statement: two would cost half as much again.
        update pgqueue.permit as p
        set free_at = case when cap.is_rate then moment + cap.period else 'infinity' end,
            job_id = (select j.id from pgqueue.job as j where j.ctid = any (picks)), token = new_token, taken_at = moment
        where p.ctid = any (array(
            select f.ctid
            from pgqueue.permit as f
            where pgqueue._is_permit_of(f, _pick_under_cap.queue, '', '')
                and pgqueue._is_free(f, cap.is_rate, cap.most, moment) and f.free_at >= since
                and (f.taken_at is not null or not pgqueue._is_double(f))
            order by f.free_at desc
            limit 1
            for update skip locked
        ))
        returning p.ctid into own_permit;
        if found then
            permits := array[own_permit];
            return;
        end if;
    end if;
    locked := array(
        select p.ctid
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _pick_under_cap.queue, '', '')
            and pgqueue._is_free(p, cap.is_rate, cap.most, moment) and p.free_at >= since
            and (p.taken_at is not null or not pgqueue._is_double(p))
        order by p.free_at desc
        limit cardinality(picks)
        for update skip locked
    );
    if cardinality(locked) < cardinality(picks) then
        -- Other sessions took some of the permits first, or some are copies.
        perform pgqueue._put_back(
            queue, kinds, paused, array(select j.id from pgqueue.job as j where j.ctid = any (picks[cardinality(locked) + 1:])),
            permits
        );
        perform pgqueue._merge_permits(queue, '', array['']::text[]);
        picks := picks[:cardinality(locked)];
    end if;
    ids := array(select j.id from pgqueue.job as j where j.ctid = any (picks));
    with given as (
        update pgqueue.permit as p
        set free_at = case when cap.is_rate then moment + cap.period else 'infinity' end,
            job_id = ids[array_position(locked, p.ctid)], token = new_token, taken_at = moment
        where p.ctid = any (locked)
        returning p.job_id, p.ctid as tid
    )
    select _pick_under_cap.job_of || array_agg(g.job_id), _pick_under_cap.permits || array_agg(g.tid)
    into job_of, permits
    from given as g;
end;
$$;

-- _pick_lanes under the caps of a queue: picks as many jobs as there are permits for, and gives the permits
-- to this claim's token. The job job_of[i] has the permit permits[i].
create or replace function pgqueue._pick_capped(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, settings pgqueue.queue_in_force,
    new_token bigint, out picks tid[], out job_of bigint[], out permits tid[]
)
    language plpgsql
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    caps pgqueue._cap[] := pgqueue._caps_of(settings.caps, kinds);
    wanted int := max_jobs;
    room record;
    passed jsonb;
    found_jobs record;
    next record;
    full_kinds text[] := '{}'::text[];
begin
    picks := '{}';
    perform pgqueue._sweep_groups_if_due(moment, new_token);
    loop
        room := pgqueue._room(queue, caps, wanted, moment);
        if room.full_caps is not null and pgqueue._review_caps(queue, caps, room.full_caps, moment, new_token) then
            room := pgqueue._room(queue, caps, wanted, moment);
        end if;
        exit when room.jobs <= 0;
        passed := pgqueue._without(paused, room.full_kinds || full_kinds);
        found_jobs := pgqueue._pick_lanes(
            queue, kinds, passed, coalesce(room.jobs, wanted), moment, pgqueue._noted_lanes(queue, moment), settings,
            new_token
        );
        exit when found_jobs.picks = '{}';
        next := pgqueue._take_permits(
            queue, found_jobs.picks, found_jobs.job_of, caps, new_token, moment, settings.age_after
        );
        job_of := job_of || found_jobs.job_of || next.job_of;
        permits := permits || found_jobs.permits || next.permits;
        if next.refused = '{}' then
            picks := picks || found_jobs.picks;
            exit;
        end if;
        perform pgqueue._put_back(queue, kinds, passed, next.refused, found_jobs.permits);
        perform pgqueue._merge_permits(queue, r.kind, array['']::text[]) from unnest(next.refusing) as r;
        with leased as (
            update pgqueue.job as j
            -- Only until claim() sets the real lease.
            set token = new_token, lease_expires_at = 'infinity'
            where j.ctid = any (found_jobs.picks) and j.id <> all (next.refused)
            returning j.ctid as tid
        )
        select _pick_capped.picks || coalesce(array_agg(l.tid), '{}'::tid[]) into picks from leased as l;
        full_kinds := full_kinds || array(select r.kind from unnest(next.refusing) as r where r.kind <> '');
        wanted := max_jobs - cardinality(picks);
        exit when exists (select from unnest(next.refusing) as r where r.kind = '')
            -- The next claim continues.
            or clock_timestamp() > moment + interval '100 milliseconds';
    end loop;
end;
$$;
