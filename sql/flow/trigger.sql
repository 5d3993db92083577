-- A job for each change of a table: enqueue_row() is a trigger function, and the trigger's arguments say what to
-- enqueue. It has the rights of the role that writes the row, which may call enqueue but nothing private, so all of it
-- is one function. Where the table's columns are in scope it uses no variables, because a column may have any name.

create or replace function pgqueue.enqueue_row()
    returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
    -- So that payloads and keys do not depend on the session that writes the row.
    set timezone = 'UTC'
    set datestyle = 'ISO, YMD'
    set intervalstyle = 'postgres'
    set bytea_output = 'hex'
    set extra_float_digits = 1
    set lc_monetary = 'C'
    set quote_all_identifiers = off
as $$
declare
    relation text := coalesce(pg_partition_root(tg_relid), tg_relid::regclass)::text;
    options jsonb := jsonb_build_object();
    argument text;
    name text;
    run_in interval;
    problem text[];
    columns text[];
    watched text[];
    key text[];
    is_changed boolean;
    changes refcursor;
    place bigint := 0;
    last_place bigint;
    old_row jsonb := to_jsonb(old);
    new_row jsonb := to_jsonb(new);
    this_row jsonb;
    old_part jsonb;
    new_part jsonb;
    payload jsonb;
    payloads jsonb[];
    unique_keys text[];
    group_keys text[];
    bytes bigint := 0;
    enqueued bigint;
begin
    foreach argument in array coalesce(tg_argv, '{}') loop
        name := split_part(argument, '=', 1);
        -- An argument that comes twice, or is not a name and a value, gets the name '', which is refused below.
        name := case when strpos(argument, '=') in (0, length(argument)) or options ? name then '' else name end;
        options[name] := to_jsonb(substr(argument, strpos(argument, '=') + 1));
    end loop;
    columns := regexp_split_to_array(options ->> 'columns', ' ?, ?');
    watched := regexp_split_to_array(options ->> 'when_changed', ' ?, ?');
    key := regexp_split_to_array(options ->> 'key', ' ?, ?');
    if options ? 'run_in' then
        begin
            run_in := (options ->> 'run_in')::interval;
        exception when data_exception then run_in := '-1 day';
        end;
    end if;
    problem := case
        when tg_when <> 'AFTER' or tg_op = 'TRUNCATE' then array[
            'enqueue_row needs a trigger AFTER INSERT, UPDATE or DELETE', format('This one fires %s %s.', tg_when, tg_op),
            'Before the change, it may still be altered or skipped; TRUNCATE does not say which rows it deletes.'
        ]
        when not options ? 'queue' or options - '{queue,kind,columns,when_changed,key,unique_key,on_duplicate}'::text[]
            - '{group_key,priority,run_in}'::text[] <> '{}' then array[
            'enqueue_row needs a queue, and every argument must be a known name, once, with a value',
            format('They are %s.', coalesce(array_to_string(tg_argv, ', '), 'missing')),
            'The names are queue, kind, priority, run_in, on_duplicate, columns, when_changed, unique_key, group_key and key.'
        ]
        when options ->> 'priority' !~ '^-?[0-9]{1,3}$' then array[
            'priority must be -100 to 100', format('It is "%s".', options ->> 'priority'), 'The default is 0.'
        ]
        when run_in not between '0' and '1000 years' then array[
            'run_in must be an interval from 0 to 1000 years', format('It is "%s".', options ->> 'run_in'),
            'Write ''run_in=5 minutes'', or omit it for a job that is due at once.'
        ]
        when tg_level = 'STATEMENT' and tg_op = 'UPDATE' and watched is not null and key is null then array[
            'when_changed needs a key in a statement trigger',
            'Such a trigger does not know which old row has become which new one.',
            'Add ''key=id'', with the columns of the primary key.'
        ]
        when not has_schema_privilege('pgqueue', 'usage')
            or not has_function_privilege(to_regproc('pgqueue.enqueue'), 'execute') then array[
                format('role %I may not enqueue, and so may not change %s', current_user, relation),
                format('Trigger %I of the table enqueues with the rights of the role that changes a row.', tg_name),
                format('Make the role a producer: select pgqueue.grant_access(%L, ''producer'').', current_user),
                '42501'
            ]
    end;
    if tg_level = 'STATEMENT' and problem is null then
        select array[
            'enqueue_row cannot find the rows of the statement',
            format('Its tables are %s.', coalesce(nullif(concat_ws(', ', t.tgoldtable, t.tgnewtable), ''), 'missing')),
            'Write "referencing old table as old_rows new table as new_rows", or "for each row".'
        ]
        into problem
        from pg_trigger as t
        where t.tgrelid = tg_relid and t.tgname = tg_name and (
            tg_op <> 'DELETE' and t.tgnewtable is distinct from 'new_rows'
            or (tg_op = 'DELETE' or tg_op = 'UPDATE' and key is not null) and t.tgoldtable is distinct from 'old_rows'
        );
    end if;

    if tg_level = 'ROW' or problem is not null then
        null;
    elsif tg_op = 'DELETE' then
        open changes for select to_jsonb(r.*), null::jsonb, row_number() over () from old_rows as r;
    elsif tg_op = 'UPDATE' and key is not null then
        open changes for
        select o.row, n.row, n.place
        from (select to_jsonb(r.*) as row, row_number() over () as place from new_rows as r) as n
        -- A full join cannot become a nested loop, which a plan made for few rows might choose.
        full join (select to_jsonb(r.*) as row from old_rows as r) as o
            on array(select o.row -> k from unnest(key) as k) = array(select n.row -> k from unnest(key) as k)
        where coalesce(n.place, 0) > 0 order by n.place;
    else
        open changes for select null::jsonb, to_jsonb(r.*), row_number() over () from new_rows as r;
    end if;

    loop
        if changes is not null then
            last_place := place;
            fetch changes into old_row, new_row, place;
            -- In batches of at most 10,000 jobs, because an array may not exceed 1 GB.
            if bytes >= 16000000 or place is null and bytes > 0 then
                perform pgqueue.enqueue_many(
                    options ->> 'queue', payloads, options ->> 'kind', (options ->> 'priority')::int,
                    clock_timestamp() + run_in, null, case when options ? 'unique_key' then unique_keys end,
                    options ->> 'on_duplicate', case when options ? 'group_key' then group_keys end
                );
                payloads := null;
                unique_keys := null;
                group_keys := null;
                bytes := 0;
            end if;
            exit when place is null;
        end if;
        this_row := coalesce(new_row, old_row);
        problem := case
            when problem is not null then problem
            when not this_row ?& (columns || watched || key || array[options ->> 'unique_key', options ->> 'group_key'])
                then array[
                    'the table lacks a column that an argument of enqueue_row names',
                    format('It has %s.', jsonb_path_query_array(this_row, '$.keyvalue().key')),
                    'Write names as the catalog has them, without quotes, separated by commas.'
                ]
            when place = last_place then array[
                'the key of a trigger must identify its rows',
                format('Two rows of %s have the same %s.', relation, options ->> 'key'),
                'Name the columns of the primary key.'
            ]
        end;
        if problem is not null then
            raise exception using
                errcode = coalesce(problem[4], '22023'), message = problem[1], detail = problem[2], hint = problem[3];
        end if;

        is_changed := watched is null;
        foreach name in array coalesce(watched, '{}') loop
            is_changed := is_changed or old_row -> name is distinct from new_row -> name;
        end loop;
        if is_changed then
            old_part := case when columns is null then old_row when old_row is not null then '{}' end;
            new_part := case when columns is null then new_row when new_row is not null then '{}' end;
            foreach name in array coalesce(columns, '{}') loop
                old_part := jsonb_set(old_part, array[name], old_row -> name);
                new_part := jsonb_set(new_part, array[name], new_row -> name);
            end loop;
            payload := jsonb_build_object('table', relation, 'op', tg_op, 'old', old_part, 'new', new_part);
        end if;
        if changes is null then
            if is_changed then
                enqueued := pgqueue.enqueue(
                    options ->> 'queue', payload, options ->> 'kind', (options ->> 'priority')::int,
                    clock_timestamp() + run_in, null, nullif(this_row ->> (options ->> 'unique_key'), ''),
                    options ->> 'on_duplicate', nullif(this_row ->> (options ->> 'group_key'), '')
                );
            end if;
            return null;
        elsif is_changed then
            payloads := array_append(payloads, payload);
            unique_keys := array_append(unique_keys, nullif(this_row ->> (options ->> 'unique_key'), ''));
            group_keys := array_append(group_keys, nullif(this_row ->> (options ->> 'group_key'), ''));
            bytes := bytes + 1600 + pg_column_size(payload);
        end if;
    end loop;
    close changes;
    return null;
end;
$$;

comment on function pgqueue.enqueue_row() is
'For a trigger AFTER INSERT, UPDATE or DELETE: a job for each changed row, in its
transaction, with the rights of the changing role. Arguments: queue=, optionally
kind=, priority=, run_in=, on_duplicate=, columns= (those in the payload, else
all), when_changed= (an UPDATE counts only if one of these changes), unique_key=
and group_key= (a column each). Payload: table, op, new and old, null for none.
A statement trigger needs the tables old_rows and new_rows, and for old rows of
an UPDATE key= (its primary key). If enqueue refuses, the change fails.
Raises 22023 (bad argument or trigger), 42501 (the role is not a producer).';
