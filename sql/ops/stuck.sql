-- What does not move: sessions that have locked what everybody needs, leased jobs that need a look, and for each
-- queue the job that has been due for longest, and the paused one, with the answer of why(); and the call that
-- fixes it, for an operator. For a reader, also on a standby.
--
--     psql -Xf stuck.sql
--     psql -X -v queue=emails -f stuck.sql   for one queue
--
-- If there are more than 50,000 jobs, it looks for due ones only among those enqueued first.
\set QUIET on
\set ON_ERROR_STOP on
\if :{?queue}
\else
    \set queue ''
\endif

-- So that no stranger's function in the caller's search_path can run.
set local search_path = pg_catalog, pg_temp\; set local jit = off\;
-- One snapshot for all, or why() might not know a job that has just ended.
set transaction isolation level repeatable read, read only\;
with leased as (
    select
        s.id, s.queue, s.kind, row_number() over (order by s.nth > 1, s.stuck_for desc, s.id) as place,
        concat_ws('; ',
            -- Which session has locked it, as why() says for a waiting job.
            case s.problem when 'expired' then substring(
                pgqueue.why(s.id) from '^(its (?:row|table) is locked: .*?); its lease expired at '
            ) end,
            format(
                '%s for %s, worker %s, attempt %s of %s', s.problem,
                to_char(make_interval(secs => extract(epoch from s.stuck_for)), 'HH24:MI:SS'), s.worker, s.attempt,
                s.max_attempts
            )
        ) as problem,
        case s.problem
            when 'expired' then 'select * from pgqueue.maintain();'
            when 'slow' then format('select pgqueue.cancel(%s, ''too slow'');', s.id)
            else 'end its worker: when the lease has expired, the next claim cancels the job'
        end as fix
    from (
        -- Of each queue the worst first: a worker that died may have left many.
        select s.*, row_number() over (partition by s.queue, s.problem order by s.stuck_for desc, s.id) as nth
        from pgqueue.stuck as s
        where :'queue' in ('', s.queue)
    ) as s
    order by place
    limit 10
), pauses as materialized (
    select
        s.queue, s.kind, s.group_key, s.value::boolean as is_paused,
        -- The narrowest decides.
        array_position(
            '{kind and group,kind and group in all queues,group,group in all queues,kind,kind in all queues,queue}',
            s.set_for
        ) as place
    from pgqueue.settings as s
    -- Of kinds and groups only those that have a pause of their own, or are resumed.
    where s.setting = 'paused' and (num_nonnulls(s.kind, s.group_key) = 0 or s.set_for ~ '^(kind|group)')
), due as (
    -- What is paused apart from the rest, or it might hide what should run.
    select distinct on (h.queue, p.is_paused) h.*, p.is_paused
    from (
        select distinct on (j.queue, j.kind, j.group_key) j.id, j.queue, j.kind, j.group_key, j.run_at
        from (select j.* from pgqueue.jobs as j order by j.id limit 50000) as j
        where j.state in ('ready', 'blocked') and :'queue' in ('', j.queue)
        order by j.queue, j.kind, j.group_key, j.run_at, j.id
    ) as h
    cross join lateral (
        select p.is_paused
        from pauses as p
        where coalesce(p.queue, h.queue) = h.queue and coalesce(p.kind, h.kind) = h.kind
            and (p.group_key is null or p.group_key = h.group_key)
        order by p.place
        limit 1
    ) as p
    order by h.queue, p.is_paused, h.run_at, h.id
), waiting as (
    select d.*, pgqueue.why(d.id) as problem, format('its group %s ', d.group_key) as its_group
    from (
        select d.*, 10 + row_number() over (order by d.is_paused, d.run_at, d.id) as place
        from due as d
        order by place
        limit 10
    ) as d
), explained as (
    -- If it waits for a job that should have begun or ended, what keeps that one has to be fixed.
    select
        w.id, w.queue, w.kind, w.place, w.problem, coalesce(o.kind, w.kind) as its_kind, w.group_key,
        coalesce(o.reason, w.problem) as reason
    from waiting as w
    left join lateral (
        select j.kind, pgqueue.why(j.id) as reason
        from pgqueue.jobs as j
        where j.id = case
            when starts_with(w.problem, w.its_group) then substring(
                substr(w.problem, length(w.its_group) + 1)
                from '^(?:waits for|waits for the retry of|is busy with) job ([0-9]{1,18}),'
                    ' (?:which comes first:|due since|whose lease expired at) '
            )
            else substring(w.problem from '.*, but a lease expired at [^,]*, that of job ([0-9]{1,18}): its ')
        end::bigint
    ) as o on true
)
select
    f.id, left(f.queue, 40) as queue, left(f.kind, 40) as kind, f.problem,
    case
        when f.reason like 'its queue is paused%' then format('select pgqueue.resume(%L);', f.queue)
        when f.reason like 'its kind is paused%'
            then format('select pgqueue.resume(%L, kind => %L);', f.queue, f.its_kind)
        when f.reason like 'its group is paused%'
            then format('select pgqueue.resume(%L, group_key => %L);', f.queue, f.group_key)
        when f.reason like 'its kind and group are paused%'
            then format('select pgqueue.resume(%L, kind => %L, group_key => %L);', f.queue, f.its_kind, f.group_key)
        when f.reason ~ '^its (lease expired|.* runs as many jobs as it may, [0-9]+, but a lease expired) at '
            then 'select * from pgqueue.maintain();'
        when f.reason ~ '^its (queue|kind .*|group .*) runs as many jobs as it may'
            then 'raise max_running with pgqueue.configure'
        when f.reason like 'rate limited%' then 'raise rate_limit with pgqueue.configure'
        when f.reason ~ '^its (row|table) is locked: session ' then format(
            'select pg_terminate_backend(%s);', (regexp_match(f.reason, '^its [a-z]+ is locked: session ([0-9]+)'))[1]
        )
        when f.reason ~ '^its (row|table) is locked: prepared ' then format(
            'rollback prepared %L;',
            (regexp_match(f.reason, '^its [a-z]+ is locked: prepared transaction (.*?) has used it'))[1]
        )
        when f.reason ~ '^its group .* waits for the retry of job [0-9]+ at ' then format(
            'select pgqueue.run_now(%s);', (regexp_match(f.reason, '.* waits for the retry of job ([0-9]+) at '))[1]
        )
        when f.reason like 'blocked: waits for job %' then format(
            'select pgqueue.why(%s);', (regexp_match(f.reason, '^blocked: waits for job ([0-9]+)'))[1]
        )
        when f.reason like 'ready: %no worker %its kind%' then 'start a worker for its kind'
        when f.reason like 'ready: %no worker has claimed%' then 'start a worker'
        when f.reason like 'ready: waits behind%' then 'start more workers, or look at waits.sql'
        else f.fix
    end as fix
from (
    select
        null::bigint as id, null as queue, null as kind, null as its_kind, null as group_key, 0 as place,
        h.detail as problem, h.detail as reason, h.hint || ';' as fix
    from pgqueue.health() as h
    where h.check = 'locks' and h.hint <> ''
    union all
    select l.id, l.queue, l.kind, l.kind, null, l.place, l.problem, l.problem, l.fix from leased as l
    union all
    select e.id, e.queue, e.kind, e.its_kind, e.group_key, e.place, e.problem, e.reason, '' from explained as e
) as f
order by f.place
\gx (pager=off border=0)
