-- The sweep: looks again at jobs that wait for others and at batches, first at those that a loose end points to.
-- Modules depend, batch and event say what leaves loose ends.

-- Checks the next ids of jobs that have ties, and of batches, at most this many: finds what no loose end pointed to.
create or replace function pgqueue._sweep(most int)
    returns int
    language plpgsql
as $$
declare
    start bigint := coalesce(pg_sequence_last_value('pgqueue._cell_swept'), 0);
    ids bigint[];
begin
    ids := array(
        with recursive swept (id) as (
            values (start)
            union all
            select least((
                select d.job_id from pgqueue.dependency as d where d.job_id > s.id order by d.job_id limit 1
            ), (
                select b.id
                from pgqueue.batch as b
                where b.finished_at is null and b.id > s.id
                order by b.id
                limit 1
            ))
            from swept as s
            where s.id is not null
        )
        select s.id from swept as s where s.id > start limit most
    );
    if start > 0 or ids <> '{}' then
        perform setval('pgqueue._cell_swept', case when cardinality(ids) = most then ids[most] else 0 end);
    end if;
    perform pgqueue._look_at_batches(array(
        select u.id from unnest(ids) as u (id)
        where (select b.closed_at is not null from pgqueue.batch as b where b.id = u.id)
    ));
    return pgqueue._cut_ties(ids, most);
end;
$$;

-- Whether nobody else can see a row yet, by its xmin: this transaction wrote it, or one of its subtransactions,
-- whose ids are higher.
create or replace function pgqueue._is_unseen(xmin xid)
    returns boolean
    language plpgsql
as $$
declare
    own bigint := pg_current_xact_id_if_assigned()::text::bigint;
    later bigint := (xmin::text::bigint - own) & 4294967295;
begin
    -- Visible rows of other transactions have been committed.
    if later < 2147483648 then
        return pg_xact_status((own + later)::text::xid8) = 'in progress';
    end if;
    return false;
-- It has not begun yet: the row was frozen long ago, and its xmin is of an earlier round of the counter.
exception when invalid_parameter_value then
    return false;
end;
$$;

-- Handles the loose ends that are due by then, the urgent ones first, and cuts ties, at most this many of each; if
-- there is less urgent work it continues the sweep. Returns how many urgent loose ends and ties it handled.
create or replace function pgqueue._tie_loose_ends(most int, until timestamptz default 'infinity')
    returns bigint
    language plpgsql
    set enable_indexscan = on
    set enable_bitmapscan = off
    set enable_tidscan = on
    set enable_sort = off
as $$
declare
    began timestamptz := clock_timestamp();
    since timestamptz;
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.loose_end_look_idx'::regclass);
    picked record;
    done bigint := 0;
begin
    if pg_relation_size('pgqueue.loose_end') > 0 then
        since := pgqueue._begin_at('pgqueue.loose_end_look_idx', began);
        if since = '-infinity' and pg_relation_size('pgqueue.loose_end_look_idx') > 1000000 then
            -- Now, in case this look is long, and is cancelled.
            perform pgqueue._begin_later('pgqueue.loose_end_look_idx', began, began + interval '1 second');
        end if;
        with dropped as (
            delete from pgqueue.loose_end as l
            where l.ctid = any (array(
                select p.tid
                from (values (false), (true)) as n (is_new)
                cross join lateral (
                    select p.ctid as tid
                    from pgqueue.loose_end as p
                    where (p.what = 'new') = n.is_new and p.look_at between since and until
                    order by p.look_at
                    limit most
                    for update skip locked
                ) as p
                limit most
            ))
            returning l.id, l.what, l.look_at, l.what in ('event', 'wait') and pgqueue._is_unseen(l.xmin) as is_own
        )
        select
            array_agg(distinct d.id) filter (where d.what in ('ended', 'new')) as jobs,
            array_agg(distinct d.id) filter (where d.what = 'new') as recent,
            array_agg(distinct d.id) filter (where d.what = 'batch') as batches,
            array_agg(distinct d.id) filter (where d.what = 'event') as events,
            array_agg(distinct d.id) filter (where d.what = 'wait') as waits,
            array_agg(distinct d.id) filter (where d.what = 'event' and d.is_own) as own_events,
            array_agg(distinct d.id) filter (where d.what = 'wait' and d.is_own) as own_waits,
            count(*) filter (where d.what <> 'new') as urgent, count(*) as number, max(d.look_at) as last
        into picked
        from dropped as d;
        perform pgqueue._looked(
            'pgqueue.loose_end_look_idx', since, began, walked, picked.number, case when picked.number = most then picked.last end
        );
        done := picked.urgent;
        -- A session that may be ending one of these jobs may not see the tie: look again later.
        perform pgqueue._leave_loose_ends(array_agg(u.id), 'new', interval '200 milliseconds')
        from unnest(picked.recent) as u (id)
        where case when (
            select j.xmax not in ('0'::xid, j.xmin) from pgqueue.job as j where j.id = u.id
        ) then not pgqueue._is_left_alone(u.id) end;
        done := done + pgqueue._cut_ties(picked.jobs, most);
        perform pgqueue._look_at_batches(picked.batches);
        if num_nonnulls(picked.events, picked.waits) > 0 then
            done := done + pgqueue._look_at_waits(picked.events, picked.waits, most);
            -- Keep those that this transaction left itself. Until it commits nobody else sees them, so an emit and
            -- a suspend that each handle only their own would miss each other for good.
            perform
                pgqueue._leave_loose_ends(picked.own_events, 'event', interval '1 second'),
                pgqueue._leave_loose_ends(array(
                    select u.id
                    from unnest(picked.own_waits) as u (id)
                    where exists (select from pgqueue.wait as w where w.job_id = u.id offset 0)
                ), 'wait', interval '1 second');
        end if;
    end if;
    if done < most then
        done := done + pgqueue._sweep(most);
    end if;
    return done;
end;
$$;
