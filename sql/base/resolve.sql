-- Settings: which are in force for a queue, a kind or a group, and what is paused. A setting of a
-- group overrides one of a kind, that overrides one of the queue, and that one of all queues. What applies to
-- a queue is worked out when anything is set, so that a call reads one row. Also which features have ever been
-- used at all, so that plain queues do not pay for features of others.

-- Sets bits of used_seq, or of another mask, without waiting for the commit.
create or replace function pgqueue._mark(bits bigint, mask regclass default 'pgqueue.used_seq')
    returns void
    language plpgsql
as $$
begin
    if pg_sequence_last_value(mask) & bits = bits then
        return;
    end if;
    -- One session at a time. The error below releases the lock; setval is not rolled back. It locks a view, because a
    -- table may be locked for long, as by REINDEX CONCURRENTLY. Any view will do: nothing else locks one in this mode.
    lock table pgqueue._outcome in share update exclusive mode;
    -- Null if only the schema was restored.
    perform setval(mask, coalesce(pg_sequence_last_value(mask), 0) | bits);
    raise sqlstate 'PQ003';
exception when sqlstate 'PQ003' then
    null;
end;
$$;

-- The bit of used_seq that says that something is set for a queue; all bits for an empty name. Hot
-- paths inline the check.
create or replace function pgqueue._settings_bits(queue text)
    returns bigint
    language sql
    immutable
as $$
    select case when queue = '' then 9223372036854775807
        else 1::bigint << (hashtext(queue collate "default") & 255) % 63
    end
$$;

-- From now on, claims look for schedules, batches and ties.
create or replace function pgqueue._look_from_now_on()
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._mark(1::bigint << 63);
end;
$$;

-- What applies if nothing was set.
create or replace function pgqueue._defaults()
    returns pgqueue.queue_in_force
    language plpgsql
    immutable
as $$
begin
    return jsonb_populate_record(
        null::pgqueue.queue_in_force,
        (select jsonb_object_agg(s.name, s.fallback) from pgqueue._setting as s)
            || '{"queue": "", "has_narrow": false, "has_pauses": false, "has_groups": false}'
    );
end;
$$;

-- These settings, overridden by what a more specific row sets: a single expression, cheap enough for hot paths.
do $do$
begin
    execute format(
        $$
            create or replace function pgqueue._overlaid(settings pgqueue.queue_in_force, said pgqueue.queue)
                returns pgqueue.queue_in_force
                language sql
                immutable
            as 'select row(
                settings.queue, settings.has_narrow, settings.has_pauses, settings.has_groups, settings.has_access,
                settings.caps, %s
            )::pgqueue.queue_in_force'
        $$,
        (
            select string_agg(format('coalesce(said.%1$I, settings.%1$I)', s.name), ', ' order by s.place)
            from pgqueue._setting as s
            where not s.is_seldom
        )
    );
end;
$do$;

-- A setting that is not in queue_in_force, for a queue (an empty name: all) or one of its kinds.
create or replace function pgqueue._seldom(queue text, setting text, kind text default '')
    returns text
    language plpgsql
    stable
as $$
begin
    return coalesce(
        (
            select to_jsonb(q) ->> setting
            from pgqueue.queue as q
            where q.name in ('', _seldom.queue) and q.kind in ('', _seldom.kind) and q.group_key = ''
                and to_jsonb(q) ->> setting is not null
            order by q.kind <> '' desc, q.name <> '' desc
            limit 1
        ),
        (select s.fallback from pgqueue._setting as s where s.name = setting)
    );
end;
$$;

-- What is in force, according to the table queue, for a queue for which anything was set; an empty name: for all
-- other queues.
create or replace function pgqueue._resolved(name text)
    returns pgqueue.queue_in_force
    language plpgsql
    stable
    set plan_cache_mode = force_generic_plan
as $$
declare
    merged pgqueue.queue_in_force := pgqueue._defaults();
    said pgqueue.queue;
    settings record;
begin
    for said in
        select q.*
        from (values (1, ''), (2, _resolved.name)) as n (place, name)
        -- Each by the whole key: for "name in", the planner might read the settings of all queues.
        cross join lateral (
            select q.* from pgqueue.queue as q where q.name = n.name and q.kind = '' and q.group_key = '' offset 0
        ) as q
        order by n.place
    loop
        merged := pgqueue._overlaid(merged, said);
    end loop;
    settings := merged;
    settings.queue := name;
    settings.has_narrow := exists (
        select from pgqueue.queue as q
        where q.name in (_resolved.name, '') and (q.kind <> '' or q.group_key <> '')
    );
    settings.has_pauses := exists (
        select from pgqueue.queue as q
        where q.name in (_resolved.name, '') and num_nonnulls(q.paused) = 1 and (q.kind <> '' or q.group_key <> '')
    ) or exists (
        select from pgqueue.queue as q
        where q.name in (_resolved.name, '') and q.lease is not null and (q.kind <> '' or q.group_key <> '')
    );
    settings.has_groups := exists (
        select from pgqueue.queue as q
        where q.name in (_resolved.name, '') and left(q.group_key, 1) > ''
            and num_nonnulls(q.max_running, q.rate_limit, q.rate_period, q.weight, q.group_limit, q.group_on_retry) > 0
    );
    settings.has_access := nullif(exists (select from pgqueue.access as a where a.queue <> ''), false);
    settings.caps := (
        select array_agg(
            row(s.kind, '', c.is_rate, c.most, coalesce(s.period, '1 second'))::pgqueue._cap
            order by s.kind = '', s.kind, c.is_rate
        )
        from (
            select
                q.kind,
                coalesce(max(q.max_running) filter (where q.name <> ''), max(q.max_running)) as max_running,
                coalesce(max(q.rate_limit) filter (where q.name <> ''), max(q.rate_limit)) as rate_limit,
                coalesce(max(q.rate_period) filter (where q.name <> ''), max(q.rate_period)) as period
            from pgqueue.queue as q
            where q.name in (_resolved.name, '') and left(q.group_key, 1) = ''
                and num_nonnulls(q.max_running, q.rate_limit, q.rate_period, q.weight, q.group_limit, q.group_on_retry) > 0
            group by q.kind
        ) as s
        cross join lateral (values (false, s.max_running), (true, s.rate_limit)) as c (is_rate, most)
        where c.most is not null
    );
    return settings;
end;
$$;

-- This queue, if anything is set for it; for an empty name all such queues, with an empty name among them if
-- something is set for all queues, or if any access is limited.
create or replace function pgqueue._named_queues(queue text default '')
    returns table (name text)
    language sql
    stable
as $$
    select q.name from pgqueue.queue as q where _named_queues.queue = ''
    union
    select '' from pgqueue.access as a where _named_queues.queue = '' and a.queue <> ''
    union
    -- Its own row by the primary key, and then any of a kind or group.
    select q.name from pgqueue.queue as q where q.name = nullif(_named_queues.queue, '') and q.kind = '' and q.group_key = ''
    union
    (
        select q.name
        from pgqueue.queue as q
        where q.name = nullif(_named_queues.queue, '') and (q.kind <> '' or q.group_key <> '')
        limit 1
    )
$$;

-- Works out again what is in force, after a change for a queue, or (an empty name) for all.
create or replace function pgqueue._resolve(queue text)
    returns void
    language plpgsql
    -- So that one queue is found by an index.
    set plan_cache_mode = force_custom_plan
    set enable_seqscan = off
as $$
begin
    delete from pgqueue.queue_in_force as f
    where f.queue = coalesce(nullif(_resolve.queue, ''), f.queue) and (
        f is distinct from pgqueue._resolved(f.queue)
        or f.queue not in (select n.name from pgqueue._named_queues(_resolve.queue) as n)
    );
    insert into pgqueue.queue_in_force
    select r.*
    from pgqueue._named_queues(_resolve.queue) as n
    cross join lateral pgqueue._resolved(n.name) as r
    -- The offset keeps the planner, which expects many queues, from reading all of them for one.
    where not exists (select from pgqueue.queue_in_force as f where f.queue = n.name offset 0);
    perform pgqueue._mark(pgqueue._settings_bits(f.queue))
    from pgqueue.queue_in_force as f
    where f.queue = coalesce(nullif(_resolve.queue, ''), f.queue);
end;
$$;

-- The settings in force for a queue, or for a kind or group in it (empty or null: none), each from the
-- narrowest row that sets it: of the group, of the kind, of the queue, of all queues; else the default.
create or replace function pgqueue._in_force(queue text, kind text default '', group_key text default '')
    returns pgqueue.queue_in_force
    language plpgsql
    stable
    set jit = off
as $$
declare
    settings record;
    merged pgqueue.queue_in_force;
    other pgqueue.queue;
begin
    if pg_sequence_last_value('pgqueue.used_seq'::regclass)
        >> (hashtext(_in_force.queue collate "default") & 255) % 63 & 1 = 0
    then
        return pgqueue._defaults();
    end if;
    select f.* into settings from pgqueue.queue_in_force as f where f.queue = _in_force.queue collate "default";
    if not found then
        select f.* into settings from pgqueue.queue_in_force as f where f.queue = '';
        if not found then
            return pgqueue._defaults();
        end if;
    end if;
    if kind <> '' or group_key <> '' then
        -- These are not inherited: a queue may have its own besides those of its kinds and groups.
        settings.max_running := null;
        settings.rate_limit := null;
        settings.rate_period := '1 second';
    end if;
    if (kind <> '' or group_key <> '') and settings.has_narrow then
        merged := settings;
        for other in
            select q.*
            from pgqueue.queue as q
            where q.name in ('', _in_force.queue) and q.kind in ('', _in_force.kind)
                and q.group_key in ('', case when _in_force.group_key <> '' then '*' end, _in_force.group_key)
                and (q.kind <> '' or q.group_key <> '')
            order by q.group_key <> '', q.group_key <> '*', q.kind <> '', q.name <> ''
        loop
            merged := pgqueue._overlaid(merged, other);
        end loop;
        return merged;
    end if;
    return settings;
end;
$$;

-- What is paused in the groups of a queue: by group, then kind, where an empty one means any.
create or replace function pgqueue._paused_groups(queue text)
    returns jsonb
    language plpgsql
    stable
as $$
begin
    return (
        select coalesce(jsonb_object_agg(g.group_key, g.kinds), '{}')
        from (
            select s.group_key, jsonb_object_agg(s.kind, s.paused) as kinds
            from (
                select distinct on (q.group_key, q.kind) q.group_key, q.kind, q.paused
                from (
                    select q.*
                    from pgqueue.queue as q
                    where q.name in ('', _paused_groups.queue) and left(q.group_key, 1) > ''
                        and num_nonnulls(q.paused) = 1 and (q.kind <> '' or q.group_key <> '')
                    -- A subquery, or it might read the whole primary key because that is in the order wanted.
                    offset 0
                ) as q
                order by q.group_key, q.kind, q.name <> '' desc
            ) as s
            group by s.group_key
        ) as g
    );
end;
$$;

-- What is paused in a queue (is_paused: the queue itself), in the form of _paused_groups, with an empty group for any;
-- null if no kind or group differs from the queue. If there are many groups, they are left out, and * stands for
-- the name of the queue: _pause_of looks each of them up.
create or replace function pgqueue._paused(queue text, is_paused boolean)
    returns jsonb
    language plpgsql
    stable
as $$
declare
    are_many boolean := (
        select count(*) > 100
        from (
            select from pgqueue.queue as q
            where q.name in ('', _paused.queue) and left(q.group_key, 1) > ''
                and num_nonnulls(q.paused) = 1 and (q.kind <> '' or q.group_key <> '')
            limit 101
        ) as g
    );
    paused jsonb := jsonb_build_object('', jsonb_build_object('', is_paused) || (
        select coalesce(jsonb_object_agg(s.kind, s.paused), '{}')
        from (
            select distinct on (q.kind) q.kind, q.paused
            from pgqueue.queue as q
            where q.name in ('', _paused.queue) and left(q.group_key, 1) = '' and num_nonnulls(q.paused) = 1 and q.kind <> ''
            order by q.kind, q.name <> '' desc
        ) as s
    ));
begin
    if are_many then
        return paused || jsonb_build_object('*', queue);
    end if;
    paused := paused || pgqueue._paused_groups(queue);
    return case
        when jsonb_path_exists(paused, '$.*.* ? (@ != $of_queue)', jsonb_build_object('of_queue', is_paused)) then paused
    end;
end;
$$;
