-- What an operator sets: settings for all queues, for one, for a kind or a group; and pauses. How settings are
-- read is in module resolve.

-- Waits for other sessions that are changing settings or access, and keeps others from it until the transaction
-- ends. Refuses a snapshot that does not show their last change (40001): what is in force would come from old rows.
create or replace function pgqueue._lock_settings()
    returns text[]
    language plpgsql
as $$
declare
    own_xid xid8;
    last_xid xid8;
begin
    lock table pgqueue.queue in share row exclusive mode;
    own_xid := pg_current_xact_id();
    -- In a sequence, which is read regardless of the snapshot.
    last_xid := pg_sequence_last_value('pgqueue._cell_set_by')::text::xid8;
    perform setval('pgqueue._cell_set_by', own_xid::text::bigint);
    return case
        when last_xid <> own_xid and current_setting('transaction_isolation') <> 'read committed'
            and not pg_visible_in_snapshot(last_xid, pg_current_snapshot())
        then array[
            'settings or access have been changed since this transaction began',
            format('It is %s, and sees them as they were.', upper(current_setting('transaction_isolation'))),
            'Run it again.',
            '40001'
        ]
    end;
end;
$$;

-- Sets the given settings, by name, for a queue, kind and group (null: all); the rest stays as it was, or is
-- cleared with reset, except paused. Waits for other sessions that are changing settings.
create or replace function pgqueue._set(queue text, kind text, group_key text, given jsonb, reset boolean)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    scope jsonb := jsonb_build_object(
        'name', coalesce(queue, ''), 'kind', coalesce(kind, ''), 'group_key', coalesce(group_key, '')
    );
    before jsonb;
begin
    -- What is in force for a queue also depends on what is set for all queues.
    perform pgqueue._lock_settings();
    delete from pgqueue.queue as q
    where q.name = coalesce(_set.queue, '') and q.kind = coalesce(_set.kind, '')
        and q.group_key = coalesce(_set.group_key, '')
    returning to_jsonb(q) into before;
    given := jsonb_strip_nulls(
        case when reset then jsonb_build_object('paused', before -> 'paused') else coalesce(before, '{}') end
            || scope || given
    );
    -- A row that would set nothing is not written again. There is a conflict only with a row that an old snapshot
    -- cannot see, and under such a snapshot the conflict raises an error.
    if given <> scope then
        insert into pgqueue.queue
        select q.* from jsonb_populate_record(null::pgqueue.queue, given) as q
        on conflict do nothing;
    end if;
end;
$$;

-- Refuses a setting outside its range, or for a kind or group that cannot have it.
create or replace function pgqueue._check_settings(given jsonb, queue text, kind text, group_key text)
    returns text[]
    language plpgsql
    stable
as $$
begin
    return (
        select case when w.place is null
            then array[
                format('%s must be %s', s.name, s.said),
                format('It is %s.', case when s.type = 'text' then to_json(g.value)::text else g.value end),
                s.meaning || '. Omit a setting to keep it as it is.'
            ]
            else array[
                format('%s cannot be set for %s', s.name, w.place),
                format('It is %s, for %s.', g.value, concat_ws(
                    ' and ', case w.place when 'less than all' then 'queue "' || _check_settings.queue || '"' end,
                    'kind "' || _check_settings.kind || '"', 'group "' || _check_settings.group_key || '"'
                )),
                format('%s. Set it in a call without %s.', s.meaning, case w.place
                    when 'less than all' then 'queue, kind and group_key'
                    when 'a kind' then 'kind'
                    when 'a kind and a group together' then 'one of the two'
                    else 'group_key'
                end)
            ]
        end
        from jsonb_each_text(given) as g
        join pgqueue._setting as s on s.name = g.key
        cross join lateral (
            select null where not case s.type
                when 'int' then g.value::int between s.range[1]::int and coalesce(s.range[2], g.value)::int
                when 'interval' then g.value::interval between s.range[1]::interval and s.range[2]::interval
                when 'text' then g.value = any (s.range)
                else true
            end
            union all
            select n.place from unnest(s.not_for) as n (place) where case n.place
                when 'less than all'
                    then num_nonnulls(_check_settings.queue, _check_settings.kind, _check_settings.group_key) > 0
                when 'a kind' then _check_settings.kind is not null
                when 'a group' then _check_settings.group_key is not null
                when 'each group' then _check_settings.group_key = '*'
                else num_nonnulls(_check_settings.kind, _check_settings.group_key) = 2
            end
        ) as w (place)
        order by num_nonnulls(w.place), s.place
        limit 1
    );
end;
$$;

-- Refuses a handler that work cannot call.
create or replace function pgqueue._check_handler(handler regprocedure)
    returns text[]
    language plpgsql
    stable
as $$
begin
    return (
        select array[
            'handler must be a function that takes jsonb or pgqueue.job, and returns jsonb or nothing',
            format('It is a %s that returns %s.', handler, pg_get_function_result(p.oid)),
            'Such as one declared with: function send(payload jsonb) returns void.'
        ]
        from (select) as always
        left join pg_proc as p on p.oid = handler
        where handler is not null and (
            p.prokind = 'f' and not p.proretset and p.prorettype in ('void'::regtype, 'jsonb'::regtype)
                and p.pronargs = 1 and p.proargtypes[0] in ('jsonb'::regtype, 'pgqueue.job'::regtype)
        ) is not true
    );
end;
$$;

create or replace function pgqueue.configure(
    queue text,
    lease interval default null,
    max_attempts int default null,
    retry_base interval default null,
    retry_cap interval default null,
    keep_runs int default null,
    max_payload_bytes int default null,
    notify boolean default null,
    reset boolean default false,
    kind text default null,
    group_key text default null,
    weight int default null,
    group_limit int default null,
    group_on_retry text default null,
    max_running int default null,
    rate_limit int default null,
    rate_period interval default null,
    age_after interval default null,
    keep_dead interval default null,
    keep_payloads boolean default null,
    wait_target interval default null,
    keep_events interval default null,
    suspend_target interval default null,
    handler regprocedure default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    given jsonb := jsonb_strip_nulls(jsonb_build_object(
        'lease', configure.lease, 'max_attempts', configure.max_attempts, 'retry_base', configure.retry_base,
        'retry_cap', configure.retry_cap, 'keep_runs', configure.keep_runs,
        'max_payload_bytes', configure.max_payload_bytes, 'notify', configure.notify, 'weight', configure.weight,
        'group_limit', configure.group_limit, 'group_on_retry', configure.group_on_retry,
        'max_running', configure.max_running, 'rate_limit', configure.rate_limit,
        'rate_period', configure.rate_period, 'age_after', configure.age_after, 'keep_dead', configure.keep_dead,
        'keep_payloads', configure.keep_payloads, 'wait_target', configure.wait_target,
        'keep_events', configure.keep_events, 'suspend_target', configure.suspend_target,
        'handler', configure.handler
    ));
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_scope(configure.queue, configure.kind, configure.group_key, true),
        pgqueue._check_settings(given, configure.queue, configure.kind, configure.group_key),
        pgqueue._check_handler(configure.handler),
        pgqueue._lock_settings()
    ));
begin
    -- A day as 24 hours: in the time zone of a session that claims it may have 23.
    given := given || jsonb_strip_nulls(jsonb_build_object(
        'rate_period', make_interval(secs => extract(epoch from configure.rate_period)::float8)
    ));
    perform pgqueue._set(configure.queue, configure.kind, configure.group_key, given, configure.reset);
    if not configure.notify then
        -- Who sleeps must look for itself from now on, as rest says; afterwards nothing would wake it.
        perform pgqueue._wake(configure.queue);
    end if;
    perform pgqueue._resolve(coalesce(configure.queue, ''));
    if given ?| '{group_limit,max_running,rate_limit,rate_period}'
        or configure.reset and pg_relation_size('pgqueue.permit') > 0
    then
        perform pgqueue._hold_off_claims(configure.queue);
        if configure.kind is null and (configure.group_key is not null or configure.group_limit is not null or configure.reset)
        then
            perform pgqueue._apply_limits(configure.queue, configure.group_key);
        end if;
        if configure.group_key is null then
            perform pgqueue._apply_caps(configure.queue, configure.kind);
        end if;
        perform pgqueue._wake(configure.queue);
    end if;
    if given ? 'group_on_retry' then
        -- Groups may no longer wait for a retry.
        perform pgqueue._unblock_groups(configure.queue, configure.group_key);
        perform pgqueue._wake(configure.queue);
    end if;
end;
$$;

do $do$
begin
    execute format(
        'comment on function %s is %L',
        'pgqueue.configure'::regproc::regprocedure,
        $$Changes the given settings and leaves the rest; reset first clears all but
paused. A null queue sets them for every queue without its own; with kind or
group_key, for that kind or group (* for each group). The most specific wins:
group, kind, queue, all; but caps of a queue, kind and group apply together.
Settings of groups, set for a queue, apply to each of its groups.
$$ || (
            select string_agg(format(E'%s (%s)\n  %s.', s.name, s.facts, s.meaning), E'\n' order by s.place)
            from pgqueue._setting as s
            where s.name <> 'paused'
        ) || E'\nRaises 22023 (bad argument), 40001 (settings have changed since the snapshot).'
    );
end;
$do$;

-- Pauses or resumes a queue, kind or group (null: all), and overrides earlier calls for anything within that.
create or replace function pgqueue._set_paused(queue text, kind text, group_key text, paused boolean)
    returns void
    language plpgsql
    -- So that whatever is not null is found by an index, and the first job of a queue without reading the others.
    set plan_cache_mode = force_custom_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    scope text[] := array[coalesce(queue, ''), coalesce(kind, ''), coalesce(group_key, '')];
begin
    if _set_paused.queue is not null
        and not exists (select from pgqueue.queue_in_force as f where f.queue = _set_paused.queue collate "default")
        and not exists (
            select from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_set_paused.queue collate "default") and j.queue = _set_paused.queue
        )
    then
        raise notice using
            message = format('queue "%s" has neither jobs nor settings', _set_paused.queue),
            hint = 'Is the name right? select queue from pgqueue.queues lists existing queues.';
    end if;
    -- "Not paused" means something only while a wider scope is paused.
    perform pgqueue._set(queue, kind, group_key, jsonb_build_object('paused', case
        when _set_paused.paused or exists (
            select from pgqueue.queue as wider
            where wider.paused and wider.name in ('', scope[1]) and wider.kind in ('', scope[2])
                and wider.group_key in ('', scope[3]) and scope <> array[wider.name, wider.kind, wider.group_key]
        ) then _set_paused.paused
    end), false);
    with narrower as (
        delete from pgqueue.queue as q
        where q.name = coalesce(_set_paused.queue, q.name) and q.kind = coalesce(_set_paused.kind, q.kind)
            and q.group_key = coalesce(_set_paused.group_key, q.group_key) and q.paused is not null
            and scope <> array[q.name, q.kind, q.group_key]
            -- What is narrower than a queue has a kind or a group, and so an index.
            and (_set_paused.queue is null or q.kind <> '' or q.group_key <> '')
        returning jsonb_strip_nulls(to_jsonb(q) - 'paused') as rest
    )
    insert into pgqueue.queue
    select q.*
    from narrower as n
    cross join jsonb_populate_record(null::pgqueue.queue, n.rest) as q
    where n.rest - '{name,kind,group_key}'::text[] <> '{}';
    perform pgqueue._resolve(scope[1]);
end;
$$;

create or replace function pgqueue.pause(queue text default null, kind text default null, group_key text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_scope(queue, kind, group_key, false), pgqueue._lock_settings()
    ));
begin
    perform pgqueue._set_paused(queue, kind, group_key, true);
end;
$$;

comment on function pgqueue.pause(text, text, text) is
'Lets a queue, or all queues, accept jobs but hand none out; with kind or
group_key, only jobs of that kind or group. Running jobs go on. Overrides
earlier calls for anything within; after that the most specific call wins.
Raises 22023 (bad argument), 40001 (settings have changed since the snapshot).';

create or replace function pgqueue.resume(queue text default null, kind text default null, group_key text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_scope(queue, kind, group_key, false), pgqueue._lock_settings()
    ));
begin
    perform pgqueue._set_paused(queue, kind, group_key, false);
    perform pgqueue._unblock_groups(queue, group_key);
    perform pgqueue._wake(queue);
end;
$$;

comment on function pgqueue.resume(text, text, text) is
'Undoes pause, for a queue, for all queues, or for a kind or group, which then
runs even if something wider is still paused.
Raises 22023 (bad argument), 40001 (settings have changed since the snapshot).';

-- Works out again what is in force and which features are used, if a copy or restore has left that out: a replica
-- that was made by copying rows does not have the values of the sequences.
create or replace function pgqueue._repair_settings()
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._mark(0, m.mask)
    from unnest('{pgqueue.used_seq,pgqueue.lanes_seq,pgqueue.awaited_seq}'::regclass[]) as m (mask);
    if exists (
        select from pgqueue._named_queues() as n
        where not exists (select from pgqueue.queue_in_force as f where f.queue = n.name)
            or ~pg_sequence_last_value('pgqueue.used_seq'::regclass) & pgqueue._settings_bits(n.name) <> 0
    ) then
        perform pgqueue._lock_settings(), pgqueue._resolve('');
    end if;
    if exists (select from pgqueue.schedule) or exists (select from pgqueue.batch)
        or exists (select from pgqueue.dependency) or exists (select from pgqueue.loose_end)
    then
        perform pgqueue._look_from_now_on();
    end if;
    if exists (select from pgqueue.dependency) or exists (select from pgqueue.step) or exists (select from pgqueue.wait)
    then
        perform pgqueue._mark(pgqueue._settings_bits(''), 'pgqueue.awaited_seq');
    end if;
    if exists (select from pgqueue.access as a where a.queue <> '') then
        perform pgqueue._mark(-1, 'pgqueue.awaited_seq');
    end if;
    perform pgqueue._use_lanes(l.queue) from pgqueue._lanes() as l where l.lane <> 0;
end;
$$;
