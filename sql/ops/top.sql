-- The whole service on one screen: queues with what they completed in each of the last 30 minutes, the jobs
-- that have been running for longest, and the findings of health(). For a reader, also on a standby.
--
--     psql -Xf top.sql               once
--     psql -X -v every=2 -f top.sql  again every 2 seconds, until Ctrl-C
--
-- One query, because \watch repeats only one. Its lines are printed unchanged, so control characters in
-- names and errors become dots, and names that are too long end in ~.
\set QUIET on
\set ON_ERROR_STOP on
\set ramp ' 12345678'
set local search_path = pg_catalog, pg_temp\;
select :'ENCODING' = 'UTF8' and current_setting('server_encoding') = 'UTF8' as is_utf8,
    coalesce(has_function_privilege(to_regprocedure('pgqueue.health()'), 'execute'), false) as has_health \gset
\if :is_utf8
    \set ramp ' ▁▂▃▄▅▆▇█'
\endif
\if :has_health
    \set health 'pgqueue.health()'
\else
    \set health '(select null, null, null, null where false)'
\endif
-- When the screen is redrawn, each line clears the rest of its line, and the last one all below it.
\set home ''
\set line_end ''
\set end ''
\if :{?every}
    \set home '\033[H'
    \set line_end '\033[K'
    \set end '\033[J'
\endif

-- So that no stranger's function in the caller's search_path can run.
set local search_path = pg_catalog, pg_temp\; set local jit = off\;
with minute as (
    select t.queue, (extract(epoch from date_trunc('minute', clock_timestamp()) - t.minute) / 60)::int as ago,
        t.finished
    from pgqueue.throughput as t
), spark as (
    select q.queue, string_agg(
        substr(:'ramp', 1 + ceil(8.0 * coalesce(m.finished, 0) / q.most)::int, 1), '' order by a.ago desc
    ) as line
    from (select m.queue, nullif(max(m.finished), 0) as most from minute as m where m.ago < 30 group by m.queue) as q
    cross join generate_series(0, 29) as a (ago)
    left join minute as m on m.queue = q.queue and m.ago = a.ago
    where q.most is not null
    group by q.queue
), queue as (
    select q.*, row_number() over (order by q.ready desc, q.running desc, q.dead desc, q.queue) as place,
        ceil(6.0 * q.ready / nullif(max(q.ready) over (), 0))::int as bar,
        coalesce(s.line, '') as spark
    from pgqueue.queues as q
    left join spark as s on s.queue = q.queue
), running as (
    select r.*, row_number() over (order by r.running_for desc, r.id) as place from pgqueue.running as r
), line (part, place, body) as (
    select 1, 0, format(
        'pgqueue %s on %s, %s', pgqueue.version(), current_database(),
        to_char(clock_timestamp(), 'YYYY-MM-DD HH24:MI:SS')
    )
    union all
    select 2, 0, 'QUEUE               READY          RUN   DEAD   OLDEST  DONE/s  FAIL LAST 30 MINUTES'
    union all
    select
        2, q.place,
        concat_ws(
            ' ',
            rpad(case when length(q.queue) > 16 then left(q.queue, 15) || '~' else q.queue end, 16),
            format('%8s', case when q.is_estimate then '~' else '' end || q.ready),
            rpad(repeat('#', q.bar), 6),
            format('%5s', q.running),
            format('%6s', q.dead),
            format('%8s', coalesce(to_char(make_interval(secs => extract(epoch from q.oldest_wait)), 'HH24:MI:SS'), '-')),
            format('%7s', round(q.rate_5m, 1)),
            format('%5s', coalesce(round(100 * q.failure_rate_5m) || '%', '-')),
            case when q.paused then 'paused' else q.spark end
        )
    from queue as q
    where q.place <= 15
    union all
    select 2, 16, format('and %s more', count(*)) from queue as q where q.place > 15 having count(*) > 0
    union all
    select 3, 0, 'LONGEST RUNNING  KIND             WORKER                     FOR     LEASE  DONE'
    union all
    select
        3, r.place,
        concat_ws(
            ' ',
            format('%-16s', r.id),
            rpad(case when length(r.kind) > 16 then left(r.kind, 15) || '~' else r.kind end, 16),
            rpad(case when length(r.worker) > 20 then left(r.worker, 19) || '~' else r.worker end, 20),
            format('%9s', to_char(make_interval(secs => extract(epoch from r.running_for)), 'HH24:MI:SS')),
            format('%9s', case
                when r.lease_left < interval '0' then 'expired'
                else to_char(make_interval(secs => extract(epoch from r.lease_left)), 'HH24:MI:SS')
            end),
            case when r.total > 0 then format(
                ' %s %s%%', rpad(repeat('#', floor(10 * least(r.done / r.total, 1))::int), 10, '.'),
                floor(100 * r.done / r.total)
            ) else ' ' || coalesce(r.done::text, '') end
        )
    from running as r
    where r.place <= 10
    union all
    select
        4, row_number() over (order by h.status <> 'critical', h.name)::int,
        left(format('%s %s: %s', rpad(h.status, 8), h.name, h.more || h.detail), 100)
    from (
        -- The worst finding of each check.
        select distinct on (h.name)
            h.status, h.name, h.detail,
            coalesce('1 of ' || nullif(count(*) over of_check + coalesce(sum(
                -- The end of the last of five findings says how many more there are.
                replace((regexp_match(h.detail, '; and ([0-9,]+) more(?:, [0-9,]+ of them critical)?$'))[1], ',', '')::int
            ) over of_check, 0), 1) || ', ', '') as more
        from :health as h (name, status, detail, hint)
        where h.status <> 'ok'
        window of_check as (partition by h.name)
        order by h.name, h.status <> 'critical', h.detail
    ) as h
)
select concat(
    case when row_number() over shown = 1 then :'home' end,
    -- An empty line between two parts.
    case when l.part > lag(l.part) over shown then :'line_end' || chr(10) end,
    regexp_replace(rtrim(l.body), $$[\u0001-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e]$$, '.', 'g'), :'line_end',
    case when lead(l.part) over shown is null then :'end' end
)
from line as l
window shown as (order by l.part, l.place)
order by l.part, l.place
\if :{?every}
    \pset format unaligned
    \pset tuples_only on
    \watch :every
\else
    \g (format=unaligned tuples_only=on pager=off)
\endif
