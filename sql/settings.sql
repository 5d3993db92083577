-- The settings of queues, and which of them are in force.

create or replace function pgqueue._settings(queue text, kind text default '', group_key text default '')
    returns pgqueue.queue
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    settings pgqueue.queue;
begin
    select
        _settings.queue, null, null,
        coalesce(own.paused, shared.paused, false),
        coalesce(own.notify, shared.notify, true),
        coalesce(own.max_attempts, shared.max_attempts, 20),
        coalesce(own.keep_runs, shared.keep_runs, 7),
        coalesce(own.max_payload_bytes, shared.max_payload_bytes),
        coalesce(own.lease, shared.lease, '30 seconds'),
        coalesce(own.retry_base, shared.retry_base, '5 seconds'),
        coalesce(own.retry_cap, shared.retry_cap, '1 hour'),
        coalesce(mine.weight, own.weight, shared.weight, 1),
        coalesce(mine.group_limit, own.group_limit, shared.group_limit),
        coalesce(mine.group_on_retry, own.group_on_retry, shared.group_on_retry, 'skip')
    into settings
    from (values (_settings.queue)) as asked (name)
    left join pgqueue.queue as own on own.name = asked.name and own.kind = '' and own.group_key = ''
    left join pgqueue.queue as shared on shared.name = '' and shared.kind = '' and shared.group_key = ''
    left join pgqueue.queue as mine on mine.name = asked.name and mine.kind = '' and mine.group_key = nullif(_settings.group_key, '');

    return settings;
end;
$$;

comment on function pgqueue._settings(text, text, text) is
'The settings in force for a queue: its own, else those of all queues, else the
defaults, which are written here.';

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
    group_on_retry text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
declare
    refused boolean := pgqueue._refuse(pgqueue._check_settings(
        configure.queue, configure.lease, configure.max_attempts, configure.retry_base,
        configure.retry_cap, configure.keep_runs, configure.max_payload_bytes
    ));
begin
    if configure.reset then
        update pgqueue.queue as q
        set notify = null, max_attempts = null, keep_runs = null, max_payload_bytes = null,
            lease = null, retry_base = null, retry_cap = null,
            weight = null, group_limit = null, group_on_retry = null
        where q.name = coalesce(configure.queue, '') and q.kind = coalesce(configure.kind, '')
            and q.group_key = coalesce(configure.group_key, '');
    end if;
    insert into pgqueue.queue as q (
        name, kind, group_key,
        notify, max_attempts, keep_runs, max_payload_bytes, lease, retry_base, retry_cap,
        weight, group_limit, group_on_retry
    )
    values (
        coalesce(configure.queue, ''), coalesce(configure.kind, ''), coalesce(configure.group_key, ''),
        configure.notify, configure.max_attempts,
        configure.keep_runs, configure.max_payload_bytes, configure.lease,
        configure.retry_base, configure.retry_cap,
        configure.weight, configure.group_limit, configure.group_on_retry
    )
    on conflict (name, kind, group_key) do update set
        weight = coalesce(excluded.weight, q.weight),
        group_limit = coalesce(excluded.group_limit, q.group_limit),
        group_on_retry = coalesce(excluded.group_on_retry, q.group_on_retry),
        notify = coalesce(excluded.notify, q.notify),
        max_attempts = coalesce(excluded.max_attempts, q.max_attempts),
        keep_runs = coalesce(excluded.keep_runs, q.keep_runs),
        max_payload_bytes = coalesce(excluded.max_payload_bytes, q.max_payload_bytes),
        lease = coalesce(excluded.lease, q.lease),
        retry_base = coalesce(excluded.retry_base, q.retry_base),
        retry_cap = coalesce(excluded.retry_cap, q.retry_cap);
    if configure.group_limit is not null or configure.reset and pg_relation_size('pgqueue.slot') > 0 then
        perform pgqueue._apply_limit(configure.queue, configure.group_key);
    end if;
end;
$$;

comment on function pgqueue.configure(
    text, interval, int, interval, interval, int, int, boolean, boolean, text, text, int, int, text
) is
'Sets what is named and leaves the rest; reset first forgets all that was set.
A null queue sets it for every queue that says nothing else. lease: up to 30
days. max_attempts: from 1. retry_base, retry_cap: first and longest delay, up
to 1 year. keep_runs: days in run, 0 to 14. max_payload_bytes: from 1. notify:
may enqueue send NOTIFY.
Raises 22023 (bad argument).';

create or replace function pgqueue._set_paused(queue text, paused boolean)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    if _set_paused.queue is not null
        and not exists (select from pgqueue.queue as q where q.name = _set_paused.queue)
        and not exists (
            select from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_set_paused.queue) and j.queue = _set_paused.queue
        )
    then
        raise notice using
            message = format('there is no job in a queue "%s", and no setting of it', _set_paused.queue),
            hint = 'Is this its name? select queue from pgqueue.queues lists those that there are.';
    end if;
    if _set_paused.queue is null then
        update pgqueue.queue as q set paused = null where q.paused is not null;
    end if;
    insert into pgqueue.queue as q (name, paused)
    values (coalesce(_set_paused.queue, ''), _set_paused.paused)
    on conflict (name, kind, group_key) do update set paused = excluded.paused;
    -- A row that says nothing is no setting.
    delete from pgqueue.queue as q
    where q.paused is not true and num_nonnulls(
            q.notify, q.max_attempts, q.keep_runs, q.max_payload_bytes, q.lease, q.retry_base, q.retry_cap,
            q.weight, q.group_limit, q.group_on_retry
        ) = 0
        and (q.name = '' or not exists (
            select from pgqueue.queue as shared where shared.name = '' and shared.paused
        ));
end;
$$;

comment on function pgqueue._set_paused(text, boolean) is
'Pauses or resumes a queue; null means all, and overrules what was said of
single ones.';

create or replace function pgqueue.pause(queue text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(case when octet_length(queue) not between 1 and 200
        then pgqueue._bad_name('queue', queue)
    end);
begin
    perform pgqueue._set_paused(queue, true);
end;
$$;

comment on function pgqueue.pause(text) is
'Lets a queue, or all queues, take jobs in but give none out. What runs goes on.
Raises 22023 (bad name).';

create or replace function pgqueue.resume(queue text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(case when octet_length(queue) not between 1 and 200
        then pgqueue._bad_name('queue', queue)
    end);
begin
    perform pgqueue._set_paused(queue, false);
    if queue is not null then
        perform pgqueue._wake(queue);
    elsif current_setting('pgqueue.notify', true) is distinct from 'off' then
        perform pg_notify('pgqueue', '');
    end if;
end;
$$;

comment on function pgqueue.resume(text) is
'Undoes pause, for a queue or for all queues.
Raises 22023 (bad name).';
