-- What the rooms share: the version, the settings in force, and how an argument is refused.

create or replace function pgqueue.version()
    returns text
    language sql
    immutable
    parallel safe
    set search_path = pg_catalog, pg_temp
as $$ select '@VERSION@' $$;

comment on function pgqueue.version() is 'The version of the installed functions.';

create or replace function pgqueue._refuse(what text, detail text, hint text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'invalid_parameter_value',
        message = _refuse.what,
        detail = _refuse.detail,
        hint = _refuse.hint;
end;
$$;

comment on function pgqueue._refuse(text, text, text) is 'Raises 22023 for a bad argument.';

create or replace function pgqueue._refuse_name(what text, name text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._refuse(
        format('%s must be a text of 1 to 200 bytes', _refuse_name.what),
        coalesce('It has ' || octet_length(_refuse_name.name) || ' bytes.', 'It is null.'),
        'Use a short name; content belongs into the payload.'
    );
end;
$$;

comment on function pgqueue._refuse_name(text, text) is
'Raises 22023 for a queue, kind, key or worker name that is empty, too long or null.';

create or replace function pgqueue._refuse_run_at(run_at timestamptz)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._refuse(
        'run_at must lie between the years 1970 and 9998',
        format('It is %s.', _refuse_run_at.run_at),
        'Leave run_at out for a job that is due at once.'
    );
end;
$$;

comment on function pgqueue._refuse_run_at(timestamptz) is
'Raises 22023 for a run_at that is infinite or absurd.';

create or replace function pgqueue._check_priority(priority int)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if priority not between -100 and 100 then
        perform pgqueue._refuse(
            'priority must be -100 to 100',
            format('It is %s.', priority),
            'Larger runs first; the default is 0. Use run_at or another queue for finer orders.'
        );
    end if;
end;
$$;

comment on function pgqueue._check_priority(int) is 'Raises 22023 for a priority out of range; null passes.';

create or replace function pgqueue._check_queues(queues text[])
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if coalesce(cardinality(queues), 0) = 0 or array_ndims(queues) > 1 then
        perform pgqueue._refuse(
            'queues must be an array of one or more names',
            coalesce('It has ' || array_ndims(queues) || ' dimensions.', 'It is null or empty.'),
            'Write array[''emails''].'
        );
    end if;
    perform pgqueue._refuse_name('every queue', q.name)
    from unnest(queues) as q (name)
    where (octet_length(q.name) between 1 and 200) is not true;
end;
$$;

comment on function pgqueue._check_queues(text[]) is 'Raises 22023 for an array that does not name queues.';

create or replace function pgqueue._settings(queue text)
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
        _settings.queue,
        coalesce(own.paused, shared.paused, false),
        coalesce(own.notify, shared.notify, true),
        coalesce(own.max_attempts, shared.max_attempts, 20),
        coalesce(own.keep_runs, shared.keep_runs, 7),
        coalesce(own.max_payload_bytes, shared.max_payload_bytes),
        coalesce(own.lease, shared.lease, '30 seconds'),
        coalesce(own.retry_base, shared.retry_base, '5 seconds'),
        coalesce(own.retry_cap, shared.retry_cap, '1 hour')
    into settings
    from (values (_settings.queue)) as asked (name)
    left join pgqueue.queue as own on own.name = asked.name
    left join pgqueue.queue as shared on shared.name = '';

    return settings;
end;
$$;

comment on function pgqueue._settings(text) is
'The settings in force for a queue: its own, else those of all queues, else the defaults, which are written here.';
