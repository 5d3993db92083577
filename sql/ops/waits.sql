-- How long the attempts of the last hour waited before they began, and how long they took: a histogram for each
-- queue. For a reader, also on a standby.
--
--     psql -Xf waits.sql
--     psql -X -v queue=emails -f waits.sql   for one queue
--
-- If waits grow while jobs take as long as ever, there are too few workers. If jobs take longer, the handlers, or
-- what they call, are slow.
\set QUIET on
\set ON_ERROR_STOP on
\if :{?queue}
\else
    \set queue ''
\endif

-- So that no stranger's function in the caller's search_path can run.
set local search_path = pg_catalog, pg_temp\; set local jit = off\;
with step as (
    select
        array[
            '1 ms', '3 ms', '10 ms', '30 ms', '100 ms', '300 ms', '1 s', '3 s', '10 s', '30 s',
            '1 min', '5 min', '15 min', '1 h', '3 h', '12 h', '1 day'
        ] as names
), run as materialized (
    select
        r.queue, r.weight, width_bucket(r.waited, s.names::interval[]) as waited,
        width_bucket(r.taken, s.names::interval[]) as taken
    from step as s
    cross join pgqueue._recent_runs(clock_timestamp() - interval '1 hour') as r
    where r.worker is not null and :'queue' in ('', r.queue)
), counted as (
    select c.queue, c.place, sum(c.waited) as waited, sum(c.taken) as taken
    from (
        select r.queue, r.waited as place, r.weight as waited, 0 as taken from run as r
        union all
        select r.queue, r.taken, 0, r.weight from run as r
    ) as c
    group by c.queue, c.place
), filled as (
    select b.queue, p.place, coalesce(c.waited, 0) as waited, coalesce(c.taken, 0) as taken
    from (select c.queue, min(c.place) as least, max(c.place) as most from counted as c group by c.queue) as b
    cross join lateral generate_series(b.least, b.most) as p (place)
    left join counted as c on c.queue = b.queue and c.place = p.place
)
select
    case when length(f.queue) > 20 then left(f.queue, 19) || '~' else f.queue end as queue,
    coalesce('up to ' || s.names[f.place + 1], 'more') as "time",
    nullif(f.waited, 0) as waited,
    repeat('#', ceil(20.0 * f.waited / max(f.waited) over (partition by f.queue))::int) as "waited before it began",
    nullif(f.taken, 0) as taken,
    repeat('#', ceil(20.0 * f.taken / max(f.taken) over (partition by f.queue))::int) as "took until its end"
from filled as f
cross join step as s
order by f.queue, f.place
\g (pager=off null='')
