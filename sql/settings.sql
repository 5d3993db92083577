-- Settings: which are in force for a queue, a kind or a group, and what is paused. A setting of a
-- group comes before one of a kind, that before one of the queue, and that before one of all. What applies to
-- a queue is derived when anything is set, so that a call reads one row. Also which features have ever been
-- used at all, so that plain queues pay for no others.

create or replace function pgqueue._use(feature text)
    returns void
    language plpgsql
as $$
begin
    -- Two rows do no harm, and a unique index would make one session wait for another.
    if not exists (select from pgqueue.used as u where u.feature = _use.feature) then
        insert into pgqueue.used (feature) values (_use.feature);
    end if;
end;
$$;

comment on function pgqueue._use(text) is
'Remembers that a feature has been used, and that completions have to look for it
from now on.';

create or replace function pgqueue._mark(bits bigint)
    returns void
    language plpgsql
as $$
begin
    if pg_sequence_last_value('pgqueue.used_seq'::regclass) & bits = bits then
        return;
    end if;
    -- One at a time; a rollback releases the lock.
    lock table pgqueue.used in share update exclusive mode;
    perform setval('pgqueue.used_seq', pg_sequence_last_value('pgqueue.used_seq'::regclass) | bits);
    raise sqlstate 'PQ003';
exception when sqlstate 'PQ003' then
    null;
end;
$$;

comment on function pgqueue._mark(bigint) is
'Sets bits of used_seq, at once.';

create or replace function pgqueue._settings_bits(queue text)
    returns bigint
    language plpgsql
    immutable
as $$
begin
    return case when queue = '' then 9223372036854775807 else 1::bigint << (hashtext(queue) & 255) % 63 end;
end;
$$;

comment on function pgqueue._settings_bits(text) is
'The bit of used_seq that says that something is set for a queue; all of them for
an empty name. Hot paths inline the check.';

create or replace function pgqueue._look_from_now_on()
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._mark(1::bigint << 63);
end;
$$;

comment on function pgqueue._look_from_now_on() is
'Lets claims look for schedules, batches and ties from now on.';

create or replace function pgqueue._defaults()
    returns pgqueue.queue_in_force
    language plpgsql
    immutable
as $$
declare
    settings pgqueue.queue_in_force;
begin
    select
        ''::text as queue, false as has_narrow, false as has_pauses, false as has_groups, false as has_caps,
        false as paused, true as notify, false as keep_payloads, 20 as max_attempts, 7 as keep_runs,
        null::int as max_payload_bytes, 1 as weight, null::int as group_limit, null::int as max_running,
        null::int as rate_limit, interval '30 seconds' as lease, interval '5 seconds' as retry_base,
        interval '1 hour' as retry_cap, interval '1 second' as rate_period, null::interval as age_after,
        null::interval as keep_dead, interval '5 minutes' as wait_target, 'skip'::text as group_on_retry
    into settings;
    return settings;
end;
$$;

comment on function pgqueue._defaults() is
'What applies where nothing was set.';

create or replace function pgqueue._resolved(name text)
    returns pgqueue.queue_in_force
    language plpgsql
    stable
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    settings pgqueue.queue_in_force;
begin
    select
        _resolved.name,
        exists (
            select from pgqueue.queue as q
            where q.name in (_resolved.name, '') and (q.kind <> '' or q.group_key <> '')
        ),
        exists (
            select from pgqueue.queue as q
            where q.name in (_resolved.name, '') and num_nonnulls(q.paused, q.lease) > 0
                and (q.kind <> '' or q.group_key <> '')
        ),
        exists (
            select from pgqueue.queue as q
            where q.name in (_resolved.name, '') and q.group_key <> ''
                and num_nonnulls(q.weight, q.group_limit, q.group_on_retry, q.rate_limit, q.rate_period) > 0
        ),
        exists (
            select from pgqueue.queue as q
            where q.name in (_resolved.name, '') and left(q.group_key, 1) = ''
                and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
        ),
        coalesce(own.paused, shared.paused, d.paused),
        coalesce(own.notify, shared.notify, d.notify),
        coalesce(own.keep_payloads, shared.keep_payloads, d.keep_payloads),
        coalesce(own.max_attempts, shared.max_attempts, d.max_attempts),
        coalesce(own.keep_runs, shared.keep_runs, d.keep_runs),
        coalesce(own.max_payload_bytes, shared.max_payload_bytes),
        coalesce(own.weight, shared.weight, d.weight),
        coalesce(own.group_limit, shared.group_limit),
        coalesce(own.max_running, shared.max_running),
        coalesce(own.rate_limit, shared.rate_limit),
        coalesce(own.lease, shared.lease, d.lease),
        coalesce(own.retry_base, shared.retry_base, d.retry_base),
        coalesce(own.retry_cap, shared.retry_cap, d.retry_cap),
        coalesce(own.rate_period, shared.rate_period, d.rate_period),
        coalesce(own.age_after, shared.age_after),
        coalesce(own.keep_dead, shared.keep_dead),
        coalesce(own.wait_target, shared.wait_target, d.wait_target),
        coalesce(own.group_on_retry, shared.group_on_retry, d.group_on_retry)
    into settings
    from pgqueue._defaults() as d
    left join pgqueue.queue as own on own.name = _resolved.name and own.kind = '' and own.group_key = ''
    left join pgqueue.queue as shared on shared.name = '' and shared.kind = '' and shared.group_key = '';
    return settings;
end;
$$;

comment on function pgqueue._resolved(text) is
'What is in force for a queue for which anything was set, or (an empty name) for
all others, by the table queue.';

create or replace function pgqueue._resolve(queue text)
    returns void
    language plpgsql
    set enable_seqscan = off
as $$
begin
    delete from pgqueue.queue_in_force as f
    where _resolve.queue in ('', f.queue) and (
        f is distinct from pgqueue._resolved(f.queue)
        or not exists (select from pgqueue.queue as q where q.name = f.queue)
    );
    insert into pgqueue.queue_in_force
    select r.*
    from (select distinct q.name from pgqueue.queue as q where _resolve.queue in ('', q.name)) as n
    cross join lateral pgqueue._resolved(n.name) as r
    where not exists (select from pgqueue.queue_in_force as f where f.queue = n.name);
    perform pgqueue._mark(pgqueue._settings_bits(f.queue))
    from pgqueue.queue_in_force as f
    where _resolve.queue in ('', f.queue);
end;
$$;

comment on function pgqueue._resolve(text) is
'After a change of what was set for a queue, or (an empty name) for all: derives
what is in force.';

create or replace function pgqueue._repair_settings()
    returns void
    language plpgsql
as $$
begin
    -- A replica that was made by copying rows has no sequences.
    if exists (
        select from pgqueue.queue as q
        where not exists (select from pgqueue.queue_in_force as f where f.queue = q.name)
            or ~pg_sequence_last_value('pgqueue.used_seq'::regclass) & pgqueue._settings_bits(q.name) <> 0
    ) then
        perform pgqueue._begin_change(), pgqueue._resolve('');
    end if;
    if exists (select from pgqueue.schedule) or exists (select from pgqueue.batch)
        or exists (select from pgqueue.dependency)
    then
        perform pgqueue._look_from_now_on();
    end if;
end;
$$;

comment on function pgqueue._repair_settings() is
'Derives again what is in force, and what is used, if a copy or restore has left
that out.';

create or replace function pgqueue._in_force(queue text, kind text default '', group_key text default '')
    returns pgqueue.queue_in_force
    language plpgsql
    stable
    set jit = off
as $$
declare
    settings record;
    other pgqueue.queue;
begin
    if pg_sequence_last_value('pgqueue.used_seq'::regclass) >> (hashtext(_in_force.queue) & 255) % 63 & 1 = 0 then
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
        -- These are not inherited: a queue may have its own, beside those of its kinds and groups.
        settings.max_running := null;
        settings.rate_limit := null;
        settings.rate_period := '1 second';
    end if;
    if (kind <> '' or group_key <> '') and settings.has_narrow then
        for other in
            select q.*
            from pgqueue.queue as q
            where q.name in ('', _in_force.queue) and q.kind in ('', _in_force.kind)
                and q.group_key in ('', case when _in_force.group_key <> '' then '*' end, _in_force.group_key)
                and (q.kind <> '' or q.group_key <> '')
            order by q.group_key <> '', q.group_key <> '*', q.kind <> '', q.name <> ''
        loop
            settings.paused := coalesce(other.paused, settings.paused);
            settings.keep_payloads := coalesce(other.keep_payloads, settings.keep_payloads);
            settings.max_attempts := coalesce(other.max_attempts, settings.max_attempts);
            settings.keep_runs := coalesce(other.keep_runs, settings.keep_runs);
            settings.max_payload_bytes := coalesce(other.max_payload_bytes, settings.max_payload_bytes);
            settings.weight := coalesce(other.weight, settings.weight);
            settings.group_limit := coalesce(other.group_limit, settings.group_limit);
            settings.max_running := coalesce(other.max_running, settings.max_running);
            settings.rate_limit := coalesce(other.rate_limit, settings.rate_limit);
            settings.lease := coalesce(other.lease, settings.lease);
            settings.retry_base := coalesce(other.retry_base, settings.retry_base);
            settings.retry_cap := coalesce(other.retry_cap, settings.retry_cap);
            settings.rate_period := coalesce(other.rate_period, settings.rate_period);
            settings.keep_dead := coalesce(other.keep_dead, settings.keep_dead);
            settings.group_on_retry := coalesce(other.group_on_retry, settings.group_on_retry);
        end loop;
    end if;
    return settings;
end;
$$;

comment on function pgqueue._in_force(text, text, text) is
'The settings in force for a queue, or for a kind or group in it (empty or null:
none), each from the most specific row that sets it: of the group, of the kind,
of the queue, of all; else the defaults, which are written here.';

create or replace function pgqueue._paused(queue text, is_paused boolean)
    returns jsonb
    language plpgsql
    stable
as $$
begin
    return (
        select case when bool_or(g.has_others) then
            jsonb_object_agg(g.group_key, g.kinds) || case when bool_and(g.group_key <> '')
                then jsonb_build_object('', jsonb_build_object('', is_paused))
                else '{}'
            end
        end
        from (
            select
                s.group_key,
                jsonb_object_agg(s.kind, s.paused) || case when s.group_key = ''
                    then jsonb_build_object('', is_paused)
                    else '{}'
                end as kinds,
                bool_or(s.paused <> is_paused) as has_others
            from (
                select distinct on (q.group_key, q.kind) q.group_key, q.kind, q.paused
                from pgqueue.queue as q
                where q.name in ('', _paused.queue) and num_nonnulls(q.paused, q.lease) > 0
                    and (q.kind <> '' or q.group_key <> '') and q.paused is not null
                order by q.group_key, q.kind, q.name <> '' desc
            ) as s
            group by s.group_key
        ) as g
    );
end;
$$;

comment on function pgqueue._paused(text, boolean) is
'What is paused in a queue, which may itself be paused: by group, then kind,
where an empty one means any; null if no kind or group differs from the queue.';

create or replace function pgqueue._drop_empty_settings(written tid[])
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
begin
    delete from pgqueue.queue as q
    where q.ctid = any (written) and num_nonnulls(
        q.paused, q.notify, q.keep_payloads, q.max_attempts, q.keep_runs, q.max_payload_bytes, q.weight,
        q.group_limit, q.max_running, q.rate_limit, q.lease, q.retry_base, q.retry_cap, q.rate_period,
        q.age_after, q.keep_dead, q.wait_target, q.group_on_retry
    ) = 0;
end;
$$;

comment on function pgqueue._drop_empty_settings(tid[]) is
'Removes those of the rows just written that set nothing.';

create or replace function pgqueue._begin_change()
    returns void
    language plpgsql
as $$
begin
    -- What is in force for a queue also depends on what was set for all.
    lock table pgqueue.queue in share row exclusive mode;
end;
$$;

comment on function pgqueue._begin_change() is
'Waits for others that change settings.';

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
    wait_target interval default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_scope(configure.queue, configure.kind, configure.group_key),
        pgqueue._check_settings(
            configure.lease, configure.max_attempts, configure.retry_base, configure.retry_cap,
            configure.keep_runs, configure.max_payload_bytes, configure.weight,
            configure.group_limit, configure.group_on_retry, configure.max_running,
            configure.rate_limit, configure.rate_period, configure.age_after, configure.keep_dead,
            configure.wait_target
        ),
        pgqueue._check_narrow(
            configure.kind, configure.group_key, configure.notify, configure.weight,
            configure.group_limit, configure.group_on_retry, configure.max_running,
            configure.rate_limit, configure.age_after, configure.keep_dead, configure.wait_target
        )
    ));
    written tid;
begin
    perform pgqueue._begin_change();
    if configure.reset then
        update pgqueue.queue as q
        set notify = null, keep_payloads = null, max_attempts = null, keep_runs = null,
            max_payload_bytes = null, weight = null, group_limit = null, max_running = null,
            rate_limit = null, lease = null, retry_base = null, retry_cap = null, rate_period = null,
            age_after = null, keep_dead = null, wait_target = null, group_on_retry = null
        where q.name = coalesce(configure.queue, '') and q.kind = coalesce(configure.kind, '')
            and q.group_key = coalesce(configure.group_key, '');
    end if;
    insert into pgqueue.queue as q (
        name, kind, group_key, notify, keep_payloads, max_attempts, keep_runs, max_payload_bytes, weight,
        group_limit, max_running, rate_limit, lease, retry_base, retry_cap, rate_period, age_after,
        keep_dead, wait_target, group_on_retry
    )
    values (
        coalesce(configure.queue, ''), coalesce(configure.kind, ''), coalesce(configure.group_key, ''),
        configure.notify, configure.keep_payloads, configure.max_attempts, configure.keep_runs,
        configure.max_payload_bytes, configure.weight, configure.group_limit, configure.max_running,
        configure.rate_limit, configure.lease, configure.retry_base, configure.retry_cap,
        configure.rate_period, configure.age_after, configure.keep_dead, configure.wait_target,
        configure.group_on_retry
    )
    on conflict (name, kind, group_key) do update set
        notify = coalesce(excluded.notify, q.notify),
        keep_payloads = coalesce(excluded.keep_payloads, q.keep_payloads),
        max_attempts = coalesce(excluded.max_attempts, q.max_attempts),
        keep_runs = coalesce(excluded.keep_runs, q.keep_runs),
        max_payload_bytes = coalesce(excluded.max_payload_bytes, q.max_payload_bytes),
        weight = coalesce(excluded.weight, q.weight),
        group_limit = coalesce(excluded.group_limit, q.group_limit),
        max_running = coalesce(excluded.max_running, q.max_running),
        rate_limit = coalesce(excluded.rate_limit, q.rate_limit),
        lease = coalesce(excluded.lease, q.lease),
        retry_base = coalesce(excluded.retry_base, q.retry_base),
        retry_cap = coalesce(excluded.retry_cap, q.retry_cap),
        rate_period = coalesce(excluded.rate_period, q.rate_period),
        age_after = coalesce(excluded.age_after, q.age_after),
        keep_dead = coalesce(excluded.keep_dead, q.keep_dead),
        wait_target = coalesce(excluded.wait_target, q.wait_target),
        group_on_retry = coalesce(excluded.group_on_retry, q.group_on_retry)
    returning q.ctid into written;
    perform pgqueue._drop_empty_settings(array[written]);
    perform pgqueue._resolve(coalesce(configure.queue, ''));
    if num_nonnulls(configure.keep_runs, configure.keep_payloads) > 0 then
        perform pgqueue._use('keep');
    end if;
    if num_nonnulls(configure.group_limit, configure.max_running, configure.rate_limit) > 0 then
        perform pgqueue._use('permits');
    end if;
    if num_nonnulls(
        configure.group_limit, configure.max_running, configure.rate_limit, configure.rate_period
    ) > 0 or configure.reset and pg_relation_size('pgqueue.permit') > 0
    then
        if configure.kind is null and (configure.group_key is not null or configure.group_limit is not null or configure.reset)
        then
            perform pgqueue._apply_limits(configure.queue, configure.group_key);
        end if;
        if configure.group_key is null then
            perform pgqueue._apply_caps(configure.queue, configure.kind);
        end if;
        if configure.queue is not null then
            perform pgqueue._wake(configure.queue);
        elsif current_setting('pgqueue.notify', true) is distinct from 'off' then
            perform pg_notify('pgqueue', '');
        end if;
    end if;
end;
$$;

comment on function pgqueue.configure(
    text, interval, int, interval, interval, int, int, boolean, boolean, text, text, int, int, text,
    int, int, interval, interval, interval, boolean, interval
) is
'Changes the given settings and leaves the rest; reset first clears all that was
set. A null queue sets them for every queue without its own; with kind or
group_key, for that kind or group. The most specific wins: group, kind,
queue, all. lease: up to 30 days. max_attempts: from 1. retry_base, retry_cap:
first and longest delay, up to 1 year. keep_runs: days in run, 0 to 14.
keep_payloads: whether run keeps what rerun needs. keep_dead: how long dead
jobs are kept, 1 second to 10 years. max_payload_bytes: from 1. notify (only
for a queue): may enqueue send NOTIFY.
For a queue''s groups, or for one group: weight, 1 to 100, how many
jobs are served for each one of a group of weight 1; group_limit, 1 to 1000;
group_on_retry, skip or block. For a queue or a kind: max_running, 1 to 1000
jobs at once. For a queue, a kind or a group (* for each group): rate_limit, 1
to 1000 jobs that begin in any rate_period, 1 millisecond to 1 day, default 1
second; all of these apply together. For a queue: age_after, 1 second to 1
year, for each of which a waiting job counts as one priority higher; and
wait_target, 1 second to 1 year, beyond which health warns.
Raises 22023 (bad argument).';

create or replace function pgqueue._set_paused(queue text, kind text, group_key text, paused boolean)
    returns void
    language plpgsql
as $$
#variable_conflict use_column
declare
    written tid[];
begin
    perform pgqueue._begin_change();
    if _set_paused.queue is not null
        and not exists (select from pgqueue.queue as q where q.name = _set_paused.queue)
        and not exists (
            select from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_set_paused.queue) and j.queue = _set_paused.queue
        )
    then
        raise notice using
            message = format('queue "%s" has neither jobs nor settings', _set_paused.queue),
            hint = 'Is the name right? select queue from pgqueue.queues lists existing queues.';
    end if;
    with cleared as (
        update pgqueue.queue as q
        set paused = null
        where q.paused is not null
            and q.name = coalesce(_set_paused.queue, q.name)
            and q.kind = coalesce(_set_paused.kind, q.kind)
            and q.group_key = coalesce(_set_paused.group_key, q.group_key)
        returning q.ctid
    )
    select array_agg(c.ctid) into written from cleared as c;
    insert into pgqueue.queue as q (name, kind, group_key, paused)
    values (
        coalesce(_set_paused.queue, ''), coalesce(_set_paused.kind, ''),
        coalesce(_set_paused.group_key, ''), _set_paused.paused
    )
    on conflict (name, kind, group_key) do update set paused = excluded.paused;
    -- "Not paused" matters only while something wider is paused.
    with cleared as (
        update pgqueue.queue as q
        set paused = null
        where not q.paused and not exists (
            select from pgqueue.queue as wider
            where wider.paused and wider.name in ('', q.name) and wider.kind in ('', q.kind)
                and wider.group_key in ('', q.group_key)
        )
        returning q.ctid
    )
    select written || array_agg(c.ctid) into written from cleared as c;
    perform pgqueue._drop_empty_settings(written);
    perform pgqueue._resolve(coalesce(queue, ''));
end;
$$;

comment on function pgqueue._set_paused(text, text, text, boolean) is
'Pauses or resumes a queue, kind or group, where null means all, and overrides
earlier calls for anything within.';

create or replace function pgqueue.pause(
    queue text default null, kind text default null, group_key text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_pause(queue, kind, group_key));
begin
    perform pgqueue._set_paused(queue, kind, group_key, true);
end;
$$;

comment on function pgqueue.pause(text, text, text) is
'Lets a queue, or all queues, accept jobs but hand none out; with kind or
group_key, only jobs of that kind or group. Running jobs go on. Overrides
earlier calls for anything within; after that the most specific call wins.
Raises 22023 (bad argument).';

create or replace function pgqueue.resume(
    queue text default null, kind text default null, group_key text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_pause(queue, kind, group_key));
begin
    perform pgqueue._set_paused(queue, kind, group_key, false);
    perform pgqueue._unblock_groups(queue, group_key);
    if queue is not null then
        perform pgqueue._wake(queue);
    elsif current_setting('pgqueue.notify', true) is distinct from 'off' then
        perform pg_notify('pgqueue', '');
    end if;
end;
$$;

comment on function pgqueue.resume(text, text, text) is
'Undoes pause, for a queue, for all queues, or for a kind or group, which then
runs even if something wider is still paused.
Raises 22023 (bad argument).';
