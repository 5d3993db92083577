-- The router of pgqueue @VERSION@, for a database with PL/Proxy: the functions and views of pgqueue, for shards.
-- The list of the shards is the server pgqueue: p0 is shard 1, p1 is shard 2. Made by make router; see docs/shards.md.

create extension if not exists plproxy;
create schema pgqueue;
comment on schema pgqueue is 'A router to the shards of pgqueue, which have the jobs.';

-- The functions.

-- Which databases the shards are, in the order of their numbers. Inlined, so that it is planned with its caller.
create function pgqueue._list()
    returns setof text
    language sql
    stable
as $$
    select substr(o.option, strpos(o.option, '=') + 1)
    from pg_foreign_server as s
    cross join unnest(s.srvoptions) as o (option)
    where s.srvname = 'pgqueue' and o.option ~ '^p\d+='
    order by substring(o.option from '^p(\d+)')::int
$$;

-- In PL/pgSQL, which keeps the plan: every call needs it.
create function pgqueue._count()
    returns int
    language plpgsql
    stable
as $$
begin
    return (select count(*) from pgqueue._list());
end;
$$;

-- Whether a shard may not be written to: it is a standby, or its disk is full.
create function pgqueue._on_read_only(on_place int)
    returns boolean
    language plproxy
as $$
    cluster 'pgqueue';
    run on on_place;
    select pg_catalog.current_setting('transaction_read_only')::pg_catalog.bool;
$$;

-- Whether a schedule is paused; nothing if it is not on this shard, or the caller may not take it from there.
create function pgqueue._on_schedule_paused(on_place int, schedule_name text)
    returns setof boolean
    language plproxy
as $$
    cluster 'pgqueue';
    run on on_place;
    select s.paused
    from pgqueue.schedules as s
    where s.name = schedule_name and pg_catalog.has_function_privilege('pgqueue.unschedule(text)', 'execute');
$$;

-- Why a shard cannot be written to or, with reads, read; null if it can. Twice, because a session to one that was
-- restarted is only then known to be of no use.
create function pgqueue._problem(place int, reads boolean default false)
    returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set client_min_messages = error
as $$
declare
    problem text;
begin
    for attempt in 1 .. 2 loop
        begin
            problem := case when pgqueue._on_read_only(place) then 'is read-only' end;
            return case when not reads then problem end;
        exception when @DOWN@ then
            problem := 'does not answer: ' || sqlerrm;
        end;
    end loop;
    return problem;
end;
$$;

create function pgqueue.shards()
    returns table (shard int, connection text, is_up boolean, problem text)
    language sql
    set search_path = pg_catalog, pg_temp
as $$
    select l.n::int, regexp_replace(l.dsn, 'password=(''[^'']*''|\S+)', 'password=…', 'g'), p.problem is null, p.problem
    from pgqueue._list() with ordinality as l (dsn, n)
    cross join lateral (select pgqueue._problem(l.n::int - 1) offset 0) as p (problem)
    order by l.n
$$;
comment on function pgqueue.shards() is 'The shards, and whether each answers and can be written to.';

-- Whether a shard can be used, with a warning if it cannot.
create function pgqueue._is_up(place int, reads boolean default false)
    returns boolean
    language plpgsql
as $$
declare
    problem text := pgqueue._problem(place, reads);
begin
    if problem is not null then
        raise warning 'shard % %', place + 1, problem;
    end if;
    return problem is null;
end;
$$;

-- The places of those that can be used.
create function pgqueue._up(reads boolean default false)
    returns setof int
    language sql
    set search_path = pg_catalog, pg_temp
as $$ select n from generate_series(0, pgqueue._count() - 1) as n where pgqueue._is_up(n, reads) $$;

-- A random one that can be written to.
create function pgqueue._any()
    returns int
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set client_min_messages = error
as $$
declare
    shards int := pgqueue._count();
    place int;
begin
    for place in select n from generate_series(0, shards - 1) as n order by random() loop
        if pgqueue._problem(place) is null then
            return place;
        end if;
    end loop;
    raise exception using
        errcode = 'connection_failure', message = 'no shard can be written to', hint = 'Look at pgqueue.shards().';
end;
$$;

-- Where an id was given out. Inlined, because there may be thousands.
create function pgqueue._home(id bigint, shards int, above bigint)
    returns int
    language sql
    immutable
as $$
    select case when (id <= above) is not true and (id - 1) % 1024 between 0 and shards - 1
        then ((id - 1) % 1024)::int else 0 end
$$;

create function pgqueue._on_above(on_place int)
    returns bigint
    language plproxy
as $$
    cluster 'pgqueue';
    run on on_place;
    select coalesce((select s.above from pgqueue.shard as s), 0);
$$;

-- Up to which number ids and tokens are older than the shards, and so of the first; null if none can tell. A session
-- asks once, as long as there are as many.
create function pgqueue._above(shards int)
    returns bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    place int;
    above bigint;
begin
    if current_setting('pgqueue.above', true) ~ format('^%s [0-9]{1,19}$', shards) then
        return split_part(current_setting('pgqueue.above'), ' ', 2);
    end if;
    for place in select * from generate_series(0, shards - 1) loop
        begin
            above := pgqueue._on_above(place);
            perform set_config('pgqueue.above', concat(shards, ' ', above), false);
            return above;
        exception when @DOWN@ or insufficient_privilege then
            null;
        end;
    end loop;
    return null;
end;
$$;

-- Raises the problem that the first shard had.
create function pgqueue._raise(problem text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = problem[1],
        message = regexp_replace(problem[2], '^.* REMOTE ERROR: ', ''),
        detail = regexp_replace(problem[3], '^Remote detail: ', ''),
        hint = regexp_replace(problem[4], '^Remote hint: ', '');
end;
$$;

-- Where a job goes: to what it belongs to, else by its key, else to any.
create function pgqueue._place(ids bigint[], group_key text, unique_key text)
    returns int
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    shards int := pgqueue._count();
    above bigint := case when ids <> '{}' then pgqueue._above(shards) end;
    homes int[] := array(
        select distinct pgqueue._home(i.id, shards, above) from unnest(ids) as i (id) where i.id is not null
    );
    of_key int := case when coalesce(group_key, unique_key) is not null
        then pgqueue.shard_of(coalesce(group_key, unique_key), shards) end;
begin
    if cardinality(homes) > 1 or homes[1] <> of_key then
        raise exception using
            errcode = '22023',
            message = 'what belongs together must be on one shard',
            detail = format('The job belongs to shards %s.', array_to_string(homes || of_key, ' and ', 'any')),
            hint = 'Give its batch, and the jobs that it waits for, its group_key or unique_key.';
    end if;
    return coalesce(homes[1], of_key, pgqueue._any());
end;
$$;

-- The least, and no more than five seconds: nobody can be notified through a router.
create function pgqueue.rest(queues text[], kinds text[] default null, park boolean default true)
    returns interval
    language sql
    set search_path = pg_catalog, pg_temp
    set client_min_messages = warning
    set intervalstyle = 'postgres'
as $$
    select least(min(pgqueue._on_rest(u.place, rest.queues, rest.kinds, false)), interval '5 seconds')
    from pgqueue._up(reads => true) as u (place)
$$;

create function pgqueue.health()
    returns table (shard int, status text, "check" text, detail text, hint text)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set client_min_messages = error
as $$
#variable_conflict use_column
declare
    s record;
begin
    for s in select * from pgqueue.shards() order by is_up, shard loop
        if not s.is_up then
            return query
            select s.shard, 'critical', 'shard', format('shard %s %s', s.shard, s.problem), 'select * from pgqueue.shards()';
        end if;
        if pgqueue._problem(s.shard - 1, reads => true) is null then
            return query
            select s.shard, h.status, h.check, h.detail, h.hint from pgqueue._on_health(s.shard - 1) as h;
        end if;
    end loop;
end;
$$;

-- With a label for the shard; the samples of a metric stay together, as the format wants it.
create function pgqueue.metrics(by_queue boolean default false)
    returns text
    language sql
    set search_path = pg_catalog, pg_temp
    set client_min_messages = warning
as $$
    with line as (
        select u.place, l.n, l.line, l.line ~ '^#' as is_head,
            coalesce(substring(l.line from '^# \w+ (\w+)'), substring(l.line from '^\w+')) as metric
        from pgqueue._up(reads => true) as u (place)
        cross join lateral string_to_table(pgqueue._on_metrics(u.place, metrics.by_queue), E'\n')
            with ordinality as l (line, n)
        where l.line <> ''
    ), shown as (
        select distinct on (l.metric, case when l.is_head then l.line end, case when not l.is_head then l.place end,
            case when not l.is_head then l.n end)
            l.*, min(l.n) over (partition by l.metric) as begins,
            case
                when l.is_head then l.line
                when l.line ~ '^\w+\{' then regexp_replace(l.line, '\{', format('{shard="%s",', l.place + 1))
                else regexp_replace(l.line, '^\w+', format('\&{shard="%s"}', l.place + 1))
            end as said
        from line as l
        order by l.metric, case when l.is_head then l.line end, case when not l.is_head then l.place end,
            case when not l.is_head then l.n end, l.place
    )
    select string_agg(s.said, E'\n' order by s.begins, s.metric, s.is_head desc, case when s.is_head then s.n end, s.place, s.n)
        || E'\n'
    from shown as s
$$;
