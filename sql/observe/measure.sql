-- Counts for the views: exact if that is cheap, else estimated.
--
-- A table of up to 16 MB is read whole. In a larger one the jobs are counted along their lanes, so that a file
-- left large by a burst costs nothing; what a lane has beyond some thousands is estimated from a sample of
-- pages. Running jobs are at the beginning of their lanes, and are counted there.
--
-- The log is read in the order of its pages, which is nearly that of time: the first page of a period is found
-- by bisection, and if there are many pages, only every nth is read.

-- How a job counts: ready, scheduled, leased, expired, x if past its expires_at, or blocked. A job whose group is
-- full also counts as blocked (has_full: whether any group is full).
create or replace function pgqueue._counts_as(
    queue text, group_key text, priority int, run_at timestamptz, lease_expires_at timestamptz, expires_at timestamptz,
    moment timestamptz, has_full boolean
)
    returns table (state "char")
    language sql
    stable
as $$
    select (case
        when has_full and group_key is not null and o.state = 'r' and exists (
            select
            from pgqueue.ticket as t
            where pgqueue._is_ticket_of(t, _counts_as.queue, _counts_as.group_key) and t.priority + 0 = _counts_as.priority
                -- Below 0, it was unknown for how long. If no claim has looked since, it is full as long as a job
                -- holds a permit.
                and t.is_full and (t.at > moment or t.served < 0 and (t.at > moment - interval '1 minute' or exists (
                    select
                    from pgqueue.permit as p
                    where pgqueue._is_permit_of(p, t.queue, '', t.group_key)
                        and not p.is_rate and p.free_at = 'infinity' and exists (
                            select from pgqueue.job as j
                            where j.id = p.job_id and (j.token is not null or j.run_at > moment)
                            offset 0
                        )
                )))
        ) then 'b'
        else o.state
    end)::"char"
    from (
        select case
            when lease_expires_at > moment then 'l'
            when lease_expires_at is not null then 'e'
            when expires_at <= moment then 'x'
            when run_at = 'infinity' then 'b'
            when run_at > moment then 's'
            else 'r'
        end as state
    ) as o
$$;

-- The first jobs of each lane, and how each counts: ten, or of each longer lane an equal part of share; if most of the
-- first ten are running, also an equal part of more; and one, by which is_cut says that the lane goes on, and is_busy
-- that more of its jobs may be running. Two index descents for each lane, because there may be thousands.
-- In a lane of groups that are served in turn, leased jobs are not in front, but at the front of their groups. So of up
-- to 1000 groups (each at each of its priorities) those among the first ten are added, if the first three have any, and
-- more if all three are.
create or replace function pgqueue._fronts(share int, more int, moment timestamptz, has_full boolean)
    returns table (
        queue text, id bigint, run_at timestamptz, worker text, state "char", is_cut boolean, is_busy boolean
    )
    language sql
    stable
as $$
    with recursive lane as (
        select -2147483648 as hash, -2147483648 as lane, 0::bigint as jobs, 0::bigint as leased
        union all
        select n.*
        from lane as l
        cross join lateral (
            select f.hash, f.lane, count(*), count(f.lease_expires_at)
            from (
                select
                    hashtext(j.queue) as hash, j.priority + 1000 * num_nonnulls(j.group_key) as lane, j.lease_expires_at
                from pgqueue.job as j
                where (hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key))) > (l.hash, l.lane)
                    and j.queue >= ''
                order by hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
                limit 11
            ) as f
            -- They come in this order, but the planner uses that only if told.
            group by f.hash, f.lane
            order by f.hash, f.lane
            limit 1
        ) as n
    ), sized as materialized (
        select
            l.*,
            case when l.jobs > 10 then greatest(
                _fronts.share / count(*) filter (where l.jobs > 10) over () - 30 + case when l.leased > 5
                    then _fronts.more / count(*) filter (where l.jobs > 10 and l.leased > 5) over () else 0
                end, 10
            ) else 10 end as most
        from lane as l
        where l.jobs > 0
    ), walked as materialized (
        select
            j.queue, j.id, j.run_at, j.worker, c.state, j.place > s.most as is_cut,
            j.place > s.most and case s.most when 10 then s.leased > 9 else j.lease_expires_at is not null end as is_busy
        from sized as s
        cross join lateral (
            select j.*, row_number() over () as place
            from (
                select j.*
                from pgqueue.job as j
                where hashtext(j.queue) = s.hash and (j.priority + 1000 * num_nonnulls(j.group_key)) = s.lane
                    and j.queue >= ''
                order by j.run_at, j.id
                limit s.most + 1
            ) as j
        ) as j
        cross join lateral pgqueue._counts_as(
            j.queue, j.group_key, j.priority, j.run_at, j.lease_expires_at, (j.terms).expires_at, moment, has_full
        ) as c
    ), groups as (
        select -9223372036854775808 as hash, -1000 as below, 0::bigint as leased, 0 as nth
        union all
        select n.hash, n.below, n.leased, g.nth + 1
        from groups as g
        cross join lateral (
            select f.hash, f.below, count(f.lease_expires_at) as leased
            from (
                select
                    hashtextextended(j.group_key, hashtext(j.queue)) as hash, -j.priority as below, j.lease_expires_at
                from pgqueue.job as j
                where j.group_key is not null
                    and (hashtextextended(j.group_key, hashtext(j.queue)), -j.priority) > (g.hash, g.below)
                order by hashtextextended(j.group_key, hashtext(j.queue)), -j.priority, j.run_at, j.id
                limit 3
            ) as f
            group by f.hash, f.below
            order by f.hash, f.below
            limit 1
        ) as n
        where g.nth < 1000
    )
    select w.* from walked as w
    union all
    select j.queue, j.id, j.run_at, j.worker, (case when j.lease_expires_at > moment then 'l' else 'e' end)::"char", false, false
    from (
        select g.hash, g.below, case when g.leased = 3
            then greatest(_fronts.more / count(*) filter (where g.leased = 3) over (), 10) else 10
        end as most
        from groups as g
        where g.leased > 0
    ) as g
    cross join lateral (
        select j.*
        from pgqueue.job as j
        where j.group_key is not null and hashtextextended(j.group_key, hashtext(j.queue)) = g.hash and -j.priority = g.below
        order by j.run_at, j.id
        limit g.most
    ) as j
    where j.lease_expires_at is not null and j.id not in (select w.id from walked as w)
$$;

-- The jobs of each queue by state; since when the first, and the first hundredth, of the ready ones have
-- been due; and which workers hold the running ones. Above 16 MB it is an estimate for a queue with a lane of more
-- jobs than its share of 10,000, or of 15,000 if most of the first ones are running, but at least ten.
create or replace function pgqueue._count_jobs()
    returns table (
        queue text, ready bigint, scheduled bigint, running bigint, expired bigint, blocked bigint,
        oldest timestamptz, p99 timestamptz, workers text[], is_estimate boolean
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashagg = on
    set work_mem = '32MB'
as $$
declare
    moment timestamptz := clock_timestamp();
    pages bigint := pg_relation_size('pgqueue.job') / 8192;
    step int := case when pages > 2048 then pages / 400 else 1 end;
    has_full boolean := exists (select from pgqueue.ticket as t where t.is_full);
begin
    return query
    with one as materialized (
        select f.queue collate "C" as queue, false as is_sample, f.run_at, f.worker, f.state, f.is_cut, f.is_busy
        from pgqueue._fronts(10000, 5000, moment, has_full) as f
        where step > 1
        union all
        select m.queue collate "C", true, m.run_at, m.worker, m.state, false, false
        from (
            -- Not TABLESAMPLE, which takes this many pages only on average; nor pages at equal distances, which
            -- might coincide with a regular pattern of jobs.
            select ('(' || h.page || ',0)')::tid as first, ('(' || h.page + 1 || ',0)')::tid as next
            from generate_series(0, pages - 1, step) as n (page)
            cross join lateral (select n.page + (hashint8(n.page) & 2147483647) % step) as h (page)
        ) as p
        cross join lateral (
            select j.queue, j.run_at, j.worker, c.state
            from pgqueue.job as j
            cross join lateral pgqueue._counts_as(
                j.queue, j.group_key, j.priority, j.run_at, j.lease_expires_at, (j.terms).expires_at, moment, has_full
            ) as c
            where j.ctid >= p.first and j.ctid < p.next
            -- More than fit on a page: the planner does not know that it reads only one.
            limit 300
        ) as m
    ), long as materialized (
        select hashtext(o.queue) as hash, bool_or(o.is_busy) as is_busy from one as o where o.is_cut group by 1
    ), counted as materialized (
        select
            o.queue, o.is_sample, case when o.is_sample then step else 1 end as weight,
            count(*) filter (where o.state = 'r') as ready, count(*) filter (where o.state = 's') as scheduled,
            count(*) filter (where o.state = 'l') as running, count(*) filter (where o.state = 'e') as expired,
            count(*) filter (where o.state = 'x') as overdue, count(*) filter (where o.state = 'b') as blocked,
            min(o.run_at) filter (where o.state = 'r') as oldest,
            percentile_disc(0.01) within group (order by o.run_at) filter (where o.state = 'r') as p99,
            -- From the sample only if that is the whole table.
            array_agg(distinct o.worker) filter (where o.state = 'l' and o.is_sample = (step = 1)) as workers
        from one as o
        group by 1, 2
    )
    -- The larger of the two counts: a sample misses what is rare, and a walk stops before what is far behind.
    select
        c.queue,
        max(c.ready * c.weight)::bigint, max(c.scheduled * c.weight)::bigint,
        -- Not from the sample: leased jobs are in front and close together, so one of its pages would count for
        -- too many.
        coalesce(max(c.running) filter (where not c.is_sample and not c.is_busy), max(c.running * c.weight))::bigint,
        (coalesce(max(c.expired) filter (where not c.is_sample and not c.is_busy), max(c.expired * c.weight))
            + max(c.overdue * c.weight))::bigint,
        max(c.blocked * c.weight)::bigint,
        min(c.oldest),
        coalesce(min(c.p99) filter (where c.is_sample), min(c.p99)),
        coalesce(min(c.workers), '{}'),
        c.is_long
    from (
        -- Not a join, which would compare every row with every other.
        select
            c.*, hashtext(c.queue) in (select t.hash from long as t) as is_long,
            hashtext(c.queue) in (select t.hash from long as t where t.is_busy) as is_busy
        from counted as c
    ) as c
    where not c.is_sample or c.is_long or step = 1
    group by c.queue, c.is_long;
end;
$$;

-- The dead jobs of each queue. It is an estimate for a queue with more than its share of 20,000.
create or replace function pgqueue._count_dead()
    returns table (queue text, dead bigint, is_estimate boolean)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_indexonlyscan = on
    set enable_nestloop = on
as $$
declare
    pages float8 := pg_relation_size('pgqueue.dead_job') / 8192;
begin
    return query
    -- Not by _dead_kinds: a queue may have dead jobs of many kinds.
    with recursive front as (
        select ''::text as queue
        union all
        select (select min(d.queue) from pgqueue.dead_job as d where d.queue > f.queue)
        from front as f
        where f.queue is not null
    ), counted as materialized (
        select f.queue, f.most, (
            select count(*) from (select from pgqueue.dead_job as d where d.queue = f.queue limit f.most + 1) as d
        ) as dead
        from (select f.*, greatest(20000 / count(*) over (), 20) as most from front as f where f.queue <> '') as f
    ), sample as (
        select d.queue, count(*) * pages / 320 as dead
        from pgqueue.dead_job as d tablesample system (least(100, 32000 / greatest(pages, 1))) repeatable (0)
        where (select bool_or(c.dead > c.most) from counted as c)
        group by d.queue
    )
    select
        c.queue,
        case when c.dead > c.most then greatest(c.dead, s.dead) else c.dead end::bigint,
        c.dead > c.most
    from counted as c
    left join sample as s on s.queue = c.queue;
end;
$$;

-- The dead jobs by the first line of their error. Beyond 20,000, above 16 MB, an estimate from a sample of 512 pages.
create or replace function pgqueue._dead_errors()
    returns table (
        queue text, kind text, error text, jobs bigint, first_died_at timestamptz, last_died_at timestamptz,
        job_id bigint, is_estimate boolean
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    pages float8 := pg_relation_size('pgqueue.dead_job') / 8192;
    -- If there are only a few on many pages, all are read: a sample would miss them.
    are_many boolean := (select count(*) > 20000 from (select from pgqueue.dead_job limit 20001) as d);
    sampled float8 := case when pages > 2048 and are_many then 512 / pages else 1 end;
begin
    return query
    select
        d.queue, d.kind, pgqueue._summary(d.error), (count(*) / sampled)::bigint, min(d.died_at), max(d.died_at),
        max(d.id), sampled < 1
    from pgqueue.dead_job as d tablesample system (100 * sampled) repeatable (0)
    group by 1, 2, 3;
end;
$$;

-- The leased jobs. Above 16 MB only those among the first 20,000 jobs, shared by the lanes with more than ten,
-- 10,000 more in lanes where most of the first ten are running, and the first of up to 1000 groups: there are others
-- only if claims have passed over as many (of other kinds, paused, at a cap), or more groups have jobs.
create or replace function pgqueue._leased()
    returns setof bigint
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
    set work_mem = '32MB'
as $$
begin
    if pg_relation_size('pgqueue.job') <= 16777216 then
        return query select j.id from pgqueue.job as j where j.lease_expires_at is not null;
        return;
    end if;
    return query
    select f.id from pgqueue._fronts(20000, 10000, clock_timestamp(), false) as f where f.state in ('l', 'e');
end;
$$;

-- The first page of a part of the log that has an attempt which finished since then.
create or replace function pgqueue._page_since(part int, since timestamptz)
    returns bigint
    language plpgsql
    stable
as $$
declare
    first bigint := 0;
    last bigint := pg_relation_size(('pgqueue.run_' || part)::regclass) / 8192;
    middle bigint;
begin
    while first < last loop
        middle := (first + last) / 2;
        if (
            select max(r.finished_at)
            from pgqueue.run as r
            where r.slot = part
                and r.ctid >= ('(' || middle || ',0)')::tid and r.ctid < ('(' || middle + 1 || ',0)')::tid
        ) < since then
            first := middle + 1;
        else
            last := middle;
        end if;
    end loop;
    return first;
end;
$$;

-- The attempts that have finished since then. If they fill more than this many pages, only those on every
-- weight-th page, a quarter to half of that number; and if they fill at most twice that many, also all attempts of
-- queues that have none on these pages. done is the weight if the attempt completed, failed the weight if it
-- failed or expired; otherwise 0.
create or replace function pgqueue._recent_runs(since timestamptz, most int default 400)
    returns table (
        queue text, kind text, worker text, job_id bigint, finished_at timestamptz, waited interval,
        taken interval, error text, weight int, done int, failed int
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set work_mem = '32MB'
as $$
declare
    parts int[];
    firsts bigint[];
    lasts bigint[];
    pages bigint;
    step int;
    failures text[] := array(select o.name from pgqueue._outcome as o where o.is_failure);
    -- What ended later did so before the clock was set back.
    moment timestamptz := clock_timestamp();
begin
    select array_agg(p.part), array_agg(p.first), array_agg(p.last), coalesce(sum(p.last - p.first + 1), 0)
    into parts, firsts, lasts, pages
    from (
        select
            s.part,
            pgqueue._page_since(s.part, since) as first,
            pg_relation_size(('pgqueue.run_' || s.part)::regclass) / 8192 - 1 as last
        from generate_series(0, 15) as s (part)
    ) as p
    where p.first <= p.last;
    -- A power of two, so that the next query reads the same pages again.
    step := case when pages > most then 2 ^ ceil(log(2, pages * 2.0 / most)) else 1 end;
    return query
    with sampled as materialized (
        select r.*
        from unnest(parts, firsts, lasts) as p (part, first, last)
        cross join lateral generate_series((p.first + step - 1) / step * step, p.last, step) as n (page)
        cross join lateral (
            select
                r.queue, r.kind, r.worker, r.job_id, r.finished_at, r.waited, r.taken, r.error, r.outcome,
                step as weight
            from pgqueue.run as r
            where r.slot = p.part and r.ctid >= ('(' || n.page || ',0)')::tid
                and r.ctid < ('(' || n.page + 1 || ',0)')::tid and r.finished_at between since and moment
            offset 0
        ) as r
        where step > 1
    )
    select
        a.queue, a.kind, a.worker, a.job_id, a.finished_at, a.waited, a.taken, a.error, a.weight,
        (a.outcome = 'completed')::int * a.weight, (a.outcome = any (failures))::int * a.weight
    from (
        select s.* from sampled as s
        union all
        -- By the index, because after a vacuum new rows may be on earlier pages.
        select r.queue, r.kind, r.worker, r.job_id, r.finished_at, r.waited, r.taken, r.error, r.outcome, 1
        from pgqueue.run as r
        left join (select distinct s.queue from sampled as s) as met on met.queue = r.queue
        where r.finished_at between since and moment and pages <= 2 * most and met.queue is null
    ) as a (queue, kind, worker, job_id, finished_at, waited, taken, error, outcome, weight);
end;
$$;

-- The first line of an error, with % for quoted text, addresses, paths and anything with a digit: the same
-- for errors with the same cause, and an argument for redrive.
create or replace function pgqueue._error_like(error text)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Stands for % until the text itself is escaped. Backslashes only in E'', because otherwise the session's
    -- standard_conforming_strings would decide what they mean.
    mask text := chr(1);
    pattern text := pgqueue._summary(error);
begin
    -- Quoted text, but not what stands between two apostrophes within words.
    pattern := regexp_replace(pattern, '(?<![[:alnum:]_])(''[^'']*''|"[^"]*"|`[^`]*`)(?![[:alnum:]_])', mask, 'g');
    -- E-mail addresses, URLs, paths; then whatever has a digit: 42, job42, 0xff, 10.0.0.1:5432, a UUID.
    pattern := regexp_replace(
        pattern,
        '[[:alnum:]_.+-]+@[[:alnum:]_-]+[.[:alnum:]_-]*|[[:alnum:]_]+://[^[:space:]]+|(?<![[:alnum:]_])/[^[:space:]]+',
        mask, 'g'
    );
    pattern := regexp_replace(pattern, '[[:alnum:]_:.-]*[[:digit:]][[:alnum:]_:.-]*', mask, 'g');
    pattern := regexp_replace(pattern, mask || '([[:space:]]*' || mask || ')*', mask, 'g');
    if pattern = mask then
        -- A code alone, such as E4012: a pattern that fits every error would send back, or discard, all that is dead.
        pattern := pgqueue._summary(error);
    end if;
    pattern := regexp_replace(pattern, E'([\\\\%_])', E'\\\\\\1', 'g');
    return replace(pattern, mask, '%');
end;
$$;

-- The last finished attempt of a job, if run still has it; else nulls. If it ended the job, nothing follows it. So
-- its table of the ring is looked for from the oldest on, and no further: if some jobs have to wait for long, the
-- index points to nearly everything that was logged after a job was enqueued.
create or replace function pgqueue._last_run(job_id bigint)
    returns pgqueue.run
    language plpgsql
    stable
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = on
as $$
declare
    today int := floor(date_part('epoch', clock_timestamp()) / 86400)::int;
    last pgqueue.run;
begin
    select r.* into last
    from generate_series(today, today + 15) as d (day)
    cross join lateral (
        select r.*
        from pgqueue.run as r
        where r.slot = d.day % 16 and r.job_id = _last_run.job_id and r.outcome in ('completed', 'cancelled')
        offset 0
    ) as r
    limit 1;
    if not found then
        select r.* into last
        from pgqueue.run as r
        where r.job_id = _last_run.job_id
        order by r.finished_at desc, r.attempt desc
        limit 1;
    end if;
    return last;
end;
$$;
