-- The dead jobs by queue, kind and error, the most frequent first, each with the call that sends them back to
-- work. For a reader, also on a standby. The calls are for an operator, and change nothing until dry_run is
-- removed.
--
--     psql -Xf dead.sql
--     psql -X -v queue=emails -f dead.sql   for one queue
\set QUIET on
\set ON_ERROR_STOP on
\if :{?queue}
\else
    \set queue ''
\endif

-- So that no stranger's function in the caller's search_path can run.
set local search_path = pg_catalog, pg_temp\; set local jit = off\;
select
    case when d.is_estimate then '~' else '' end || d.jobs as jobs,
    left(d.queue, 40) as queue,
    left(d.kind, 40) as kind,
    to_char(d.first_died_at, 'YYYY-MM-DD HH24:MI:SS') || ' to ' || to_char(d.last_died_at, 'YYYY-MM-DD HH24:MI:SS')
        as died,
    left(format('%s: %s', d.sample_id, d.sample_error), 80) as sample,
    -- In a pattern, _ replaces characters that the terminal could not show.
    format(
        'select pgqueue.redrive(%L, %L, error_like => %L, max_jobs => %s, dry_run => true);', d.queue, d.kind,
        regexp_replace(d.error_like, $$[\u0001-\u001f\u007f-\u009f]$$, '_', 'g'), greatest(d.jobs, 1000)
    ) as redrive
from pgqueue.dead as d
where :'queue' in ('', d.queue)
order by d.jobs desc, d.queue, d.kind, d.error_like
limit 20
\gx (pager=off border=0)
