-- How much there is, for the views: counted if that is cheap, else estimated.
--
-- A table of up to 16 MB is read whole. In a larger one the jobs are counted along their lanes, so that a file
-- left large by a burst costs nothing; what a lane has beyond some thousands is estimated from a sample of
-- pages. Running jobs are at the beginning of their lanes, and are counted there.
--
-- The log is read in the order of its pages, which is nearly that of time: the first page of a period is found
-- by bisection, and if there are many pages, only every nth is read.

-- The first jobs of each lane: ten or, of a longer one, its share of a number, by how many these are; and of a lane
-- that is busy, where most of the ten run, its share of another. is_cut: that the lane goes on is known by this row,
-- which may have no job; is_busy: and that more of it run.
create or replace function pgqueue._fronts(share int, more int)
    returns table (
        queue text, id bigint, run_at timestamptz, priority int, group_key text, worker text,
        lease_expires_at timestamptz, expires_at timestamptz, is_cut boolean, is_busy boolean
    )
    language sql
    stable
as $$
    with start as materialized (
        select l.hash, l.lane, l.first, l.first_id, w.*
        from pgqueue._lanes() as l
        cross join lateral (
            select
                j.queue, j.id, j.run_at, j.priority, j.group_key, j.worker, j.lease_expires_at,
                (j.terms).expires_at
            from pgqueue.job as j
            where hashtext(j.queue) = l.hash and (j.priority + 1000 * num_nonnulls(j.group_key)) = l.lane and j.queue >= ''
                and (j.run_at, j.id) >= (l.first, l.first_id)
            order by hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
            limit 11
        ) as w
    ), long as materialized (
        select l.*, greatest(
            _fronts.share / count(*) over () - 30 + case when l.leased > 5
                then _fronts.more / count(*) filter (where l.leased > 5) over () else 0
            end, 10
        ) as most
        from (
            select
                s.hash, s.lane, s.first, s.first_id, min(s.queue) as queue, count(s.lease_expires_at) as leased
            from start as s
            group by s.hash, s.lane, s.first, s.first_id
            having count(*) > 10
        ) as l
    )
    select
        s.queue, s.id, s.run_at, s.priority, s.group_key, s.worker, s.lease_expires_at, s.expires_at, false, false
    from start as s
    union all
    select l.queue, null, null, null, null, null, null, null, true, l.leased > 9
    from long as l
    where l.most = 10
    union all
    select
        w.queue, w.id, w.run_at, w.priority, w.group_key, w.worker, w.lease_expires_at, w.expires_at,
        w.place = l.most - 10, w.place = l.most - 10 and w.lease_expires_at is not null
    from long as l
    cross join lateral (
        select j.*, row_number() over () as place
        from (
            select
                j.queue, j.id, j.run_at, j.priority, j.group_key, j.worker, j.lease_expires_at,
                (j.terms).expires_at
            from pgqueue.job as j
            where hashtext(j.queue) = l.hash and (j.priority + 1000 * num_nonnulls(j.group_key)) = l.lane and j.queue >= ''
                and (j.run_at, j.id) >= (l.first, l.first_id)
            order by hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
            offset 11
            limit l.most - 10
        ) as j
    ) as w
    where l.most > 10
$$;

-- The jobs of each queue by state; since when the first, and the first hundredth, of the ready ones have
-- been due; and which workers hold the running ones. Above 16 MB an estimate for a queue with a lane of more
-- than its share of 10,000 jobs, or of 15,000 if most of the first run; and of ten at least.
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
    -- Aggregates without a sort, and without files for some hundred queues.
    set enable_sort = off
    set enable_hashagg = on
    set work_mem = '32MB'
as $$
#variable_conflict use_column
declare
    moment timestamptz := clock_timestamp();
    pages bigint := pg_relation_size('pgqueue.job') / 8192;
    step int := case when pages > 2048 then pages / 400 else 1 end;
    has_full boolean := exists (select from pgqueue.ticket as t where t.is_full);
begin
    return query
    with counted as materialized (
        select
            m.queue collate "C" as queue,
            m.is_sample,
            case when m.is_sample then step else 1 end as weight,
            bool_or(m.is_cut) as is_cut,
            bool_or(m.is_busy) as is_busy,
            count(*) filter (where m.state = 'r') as ready,
            count(*) filter (where m.state = 's') as scheduled,
            count(*) filter (where m.state = 'l') as running,
            count(*) filter (where m.state = 'e') as expired,
            count(*) filter (where m.state = 'x') as overdue,
            count(*) filter (where m.state = 'b') as blocked,
            min(m.run_at) filter (where m.state = 'r') as oldest,
            array_agg(m.run_at) filter (where m.state = 'r') as due,
            array_agg(m.worker) filter (where m.state = 'l') as workers
        from (
            select
                a.queue, a.run_at, a.worker, a.is_cut, a.is_busy, a.is_sample,
                case
                    when a.lease_expires_at > moment then 'l'
                    when a.lease_expires_at is not null then 'e'
                    when a.expires_at <= moment then 'x'
                    when a.run_at = 'infinity' then 'b'
                    when a.run_at > moment then 's'
                    when has_full and a.group_key is not null and exists (
                        select
                        from pgqueue.ticket as t
                        where pgqueue._is_ticket_of(t, a.queue, a.group_key) and t.priority = a.priority and t.is_full
                    ) then 'b'
                    when a.id is not null then 'r'
                end::"char" as state
            from (
                select f.*, false as is_sample
                from pgqueue._fronts(10000, 5000) as f
                where step > 1
                union all
                select s.*, false, false, true
                from (
                    -- Not TABLESAMPLE, by which so many pages come only on average; nor at equal distances, which
                    -- what comes regularly may have, too.
                    select ('(' || h.page || ',0)')::tid as first, ('(' || h.page + 1 || ',0)')::tid as next
                    from generate_series(0, pages - 1, step) as n (page)
                    cross join lateral (select n.page + (hashint8(n.page) & 2147483647) % step) as h (page)
                ) as p
                cross join lateral (
                    select
                        j.queue, j.id, j.run_at, j.priority, j.group_key, j.worker, j.lease_expires_at,
                        (j.terms).expires_at
                    from pgqueue.job as j
                    where j.ctid >= p.first and j.ctid < p.next
                    -- More than a page has room for: the planner does not know that it is one.
                    limit 300
                ) as s
            ) as a
            -- The state once for each, not for each of the aggregates.
            offset 0
        ) as m
        group by 1, 2
    ), long as materialized (
        select hashtext(c.queue) as hash, bool_or(c.is_busy) as is_busy from counted as c where c.is_cut group by 1
    )
    -- The larger of the two: a sample misses what is rare, and a walk ends before what is far behind.
    select
        c.queue,
        max(c.ready * c.weight), max(c.scheduled * c.weight),
        -- Leased jobs are in front, and close together: a page of the sample would count for too many.
        coalesce(max(c.running) filter (where not c.is_sample and not c.is_busy), max(c.running * c.weight)),
        coalesce(max(c.expired) filter (where not c.is_sample and not c.is_busy), max(c.expired * c.weight))
            + max(c.overdue * c.weight),
        max(c.blocked * c.weight),
        min(c.oldest),
        coalesce(min(c.p99) filter (where c.is_sample), min(c.p99)),
        coalesce(min(c.workers) filter (where not c.is_sample), min(c.workers)),
        c.is_long
    from (
        -- Not joined, which would compare each with each.
        select
            c.queue, c.is_sample, c.weight, c.ready, c.scheduled, c.running, c.expired, c.overdue, c.blocked, c.oldest,
            array(select distinct w.name from unnest(c.workers) as w (name)) as workers,
            case
                when c.ready <= 100 then c.oldest
                else (select percentile_disc(0.01) within group (order by d.run_at) from unnest(c.due) as d (run_at))
            end as p99,
            hashtext(c.queue) in (select t.hash from long as t) as is_long,
            hashtext(c.queue) in (select t.hash from long as t where t.is_busy) as is_busy
        from counted as c
    ) as c
    where not c.is_sample or c.is_long or step = 1
    group by c.queue, c.is_long;
end;
$$;

-- The dead jobs of each queue. An estimate for one with more than 20,000, divided by the number of
-- queues.
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
#variable_conflict use_column
declare
    pages float8 := pg_relation_size('pgqueue.dead_job') / 8192;
    queues text[];
    most int;
begin
    -- Not by _dead_kinds: a queue may have dead jobs of many kinds.
    with recursive step (queue) as (
        values (''::text)
        union all
        select (select d.queue from pgqueue.dead_job as d where d.queue > s.queue order by d.queue limit 1)
        from step as s
        where s.queue is not null
    )
    select array_agg(s.queue), greatest(20000 / greatest(count(*), 1), 20) into queues, most
    from step as s
    where s.queue <> '';
    return query
    with counted as materialized (
        select q.name, c.dead
        from unnest(queues) as q (name)
        cross join lateral (
            select count(*) as dead
            from (select from pgqueue.dead_job as d where d.queue = q.name limit most + 1) as d
        ) as c
    ), sample as (
        select d.queue, count(*) * pages / 320 as dead
        from pgqueue.dead_job as d tablesample system (least(100, 32000 / greatest(pages, 1))) repeatable (0)
        where (select max(c.dead) from counted as c) > most
        group by d.queue
    )
    select
        c.name,
        case when c.dead > most then greatest(c.dead, s.dead) else c.dead end::bigint,
        c.dead > most
    from counted as c
    left join sample as s on s.queue = c.name;
end;
$$;

-- The dead jobs by the first line of their error. Beyond 20,000, above 16 MB, an estimate from a sample
-- of 512 pages.
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
    -- A few on many pages are all read: a sample would have none of them.
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

-- The leased jobs. Above 16 MB only those among the first 20,000, of which each lane with more than ten has its
-- share, and 10,000 more of lanes where most of the first ten run: there are others only if claims by kind have
-- passed over as many.
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
    set enable_nestloop = on
as $$
begin
    if pg_relation_size('pgqueue.job') <= 16777216 then
        return query select j.id from pgqueue.job as j where j.lease_expires_at is not null;
        return;
    end if;
    return query
    select f.id from pgqueue._fronts(20000, 10000) as f where f.lease_expires_at is not null;
end;
$$;

-- The first page of a part of the log with an attempt that finished since then.
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

-- The attempts that have finished since then; if they fill more than this many pages, those on a quarter
-- to half as many, every weight-th page, and, up to twice as many pages, all those of the queues that
-- have none there. done and failed are the weight of one that completed, or that failed or expired, else
-- 0.
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
    -- A power of two: a page that one query reads is read by the next one, too.
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
                and r.ctid < ('(' || n.page + 1 || ',0)')::tid and r.finished_at >= since
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
        -- By the index, for vacuum may have made room for some on pages before.
        select r.queue, r.kind, r.worker, r.job_id, r.finished_at, r.waited, r.taken, r.error, r.outcome, 1
        from pgqueue.run as r
        left join (select distinct s.queue from sampled as s) as met on met.queue = r.queue
        where r.finished_at >= since and pages <= 2 * most and met.queue is null
    ) as a (queue, kind, worker, job_id, finished_at, waited, taken, error, outcome, weight);
end;
$$;

-- The first line of an error with % for quoted text, addresses, paths and anything with a digit: the same
-- for errors of one cause, and an argument for redrive.
create or replace function pgqueue._error_like(error text)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Until what it says for itself is escaped. No backslash but in E'': else the session's
    -- standard_conforming_strings would decide what it means.
    mask text := chr(1);
    pattern text := pgqueue._summary(error);
begin
    -- Quoted text, but not what an apostrophe and the next one enclose.
    pattern := regexp_replace(
        pattern, '(?<![[:alnum:]_])(''[^'']*''|"[^"]*"|`[^`]*`)(?![[:alnum:]_])', mask, 'g'
    );
    -- E-mail addresses, URLs, paths; then whatever has a digit: 42, job42, 0xff, 10.0.0.1:5432, a UUID.
    pattern := regexp_replace(
        pattern,
        '[[:alnum:]_.+-]+@[[:alnum:]_-]+[.[:alnum:]_-]*|[[:alnum:]_]+://[^[:space:]]+|(?<![[:alnum:]_])/[^[:space:]]+',
        mask, 'g'
    );
    pattern := regexp_replace(pattern, '[[:alnum:]_:.-]*[[:digit:]][[:alnum:]_:.-]*', mask, 'g');
    pattern := regexp_replace(pattern, E'([\\\\%_])', E'\\\\\\1', 'g');
    return regexp_replace(pattern, mask || '([[:space:]]*' || mask || ')*', '%', 'g');
end;
$$;

-- The last finished attempt of a job, as far as run remembers; else nulls.
create or replace function pgqueue._last_run(job_id bigint)
    returns pgqueue.run
    language plpgsql
    stable
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = on
as $$
begin
    return (
        select r
        from pgqueue.run as r
        where r.job_id = _last_run.job_id
        -- A claim may end the lease and, past expires_at, the job at the same moment.
        order by r.finished_at desc, r.attempt desc, r.outcome = 'expired'
        limit 1
    );
end;
$$;
