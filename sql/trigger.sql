-- A job for each change of a table: enqueue_row() is the function of a trigger, and the arguments of
-- that say what to enqueue. It is the only function that meets rows, names and types of strangers, and
-- it has the rights of its owner. So it reads transition tables only if the trigger has them (else a view
-- of that name in pg_temp would be read), and no type whose owner could have given it a cast to json:
-- to_jsonb() would call that.

create or replace function pgqueue._check_row_tables(op text, old_table text, new_table text, options jsonb)
    returns text[]
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return case
        when op = 'TRUNCATE' then array[
            'enqueue_row cannot be called for TRUNCATE',
            'It is not told which rows go.',
            'Use DELETE, or call enqueue in a trigger function of your own.'
        ]
        when op <> 'DELETE' and new_table is distinct from 'new_rows'
            or (op = 'DELETE' or op = 'UPDATE' and options ? 'key') and old_table is distinct from 'old_rows'
            then array[
                'enqueue_row does not find the rows of the statement',
                format('The old table is %s, the new one %s.', coalesce(old_table, 'missing'), coalesce(new_table, 'missing')),
                'Write "referencing old table as old_rows new table as new_rows", or "for each row".'
            ]
        when op = 'UPDATE' and options ? 'when_changed' and not options ? 'key' then array[
            'when_changed needs a key in a trigger for each statement',
            'It is not told which old row has become which new one.',
            'Add ''key=id'', with the columns of the primary key.'
        ]
    end;
end;
$$;

comment on function pgqueue._check_row_tables(text, text, text, jsonb) is
'Refuses a trigger for each statement that does not say which rows have changed.';

create or replace function pgqueue._row_options(arguments text[])
    returns jsonb
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
declare
    options jsonb := jsonb_build_object();
    argument text;
    name text;
begin
    foreach argument in array coalesce(arguments, '{}') loop
        name := split_part(argument, '=', 1);
        options := options || jsonb_build_object(
            case when strpos(argument, '=') > 0 and not options ? name then name else '' end,
            substr(argument, strpos(argument, '=') + 1)
        );
    end loop;
    return options;
end;
$$;

comment on function pgqueue._row_options(text[]) is
'The arguments of a trigger by their names; one without an =, or that comes
twice, has the empty name.';

create or replace function pgqueue._names(list text)
    returns text[]
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return string_to_array(replace(replace(list, ', ', ','), ' ,', ','), ',');
end;
$$;

comment on function pgqueue._names(text) is 'The columns in an argument of a trigger, such as columns=id,state.';

create or replace function pgqueue._but(columns text[], list text)
    returns text[]
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
declare
    name text;
begin
    foreach name in array pgqueue._names(list) loop
        columns := array_remove(columns, name);
    end loop;
    return columns;
end;
$$;

comment on function pgqueue._but(text[], text) is 'All columns but those in an argument of a trigger.';

create or replace function pgqueue._check_row_options(arguments text[], options jsonb, columns text[])
    returns text[]
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
declare
    known text[] := array[
        'queue', 'kind', 'columns', 'when_changed', 'key', 'unique_key', 'on_duplicate', 'group_key', 'priority',
        'run_in'
    ];
    named text[] := array_remove(
        pgqueue._names(concat_ws(',', options ->> 'columns', options ->> 'when_changed', options ->> 'key'))
            || array[options ->> 'unique_key', options ->> 'group_key'],
        null
    );
begin
    return case
        when options - known <> '{}'
            then array[
                'every argument of enqueue_row must be a known name, once, with a value',
                format('They are %s.', array_to_string(arguments, ', ')),
                format('The names are %s. Write ''queue=emails''.', array_to_string(known, ', '))
            ]
        when not named <@ columns then array[
            'the table lacks a column that an argument of enqueue_row names',
            format('%s of %s.', (
                select string_agg('"' || n.name || '"', ', ') from unnest(named) as n (name) where n.name <> all (columns)
            ), array_to_string(columns, ', ')),
            'Write names as the catalog has them, without quotes, separated by commas.'
        ]
        when options ->> 'priority' !~ '^-?\d{1,3}$' then array[
            'priority must be -100 to 100',
            format('It is "%s".', options ->> 'priority'),
            'Larger runs first; the default is 0.'
        ]
        else coalesce(
            pgqueue._check_job(
                options ->> 'queue', options ->> 'kind', (options ->> 'priority')::int, null, null, null,
                options ->> 'on_duplicate', null, null
            ),
            case when options ? 'run_in' then pgqueue._check_run_in(options ->> 'run_in') end
        )
    end;
end;
$$;

comment on function pgqueue._check_row_options(text[], jsonb, text[]) is
'Refuses arguments of a trigger that enqueue_row does not know, or that name no
column.';

create or replace function pgqueue._check_run_in(run_in text)
    returns text[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if run_in::interval between '0' and '1000 years' then
        return null;
    end if;
    raise sqlstate '22007';
exception when data_exception then
    return array[
        'run_in must be an interval from 0 to 1000 years',
        format('It is "%s".', run_in),
        'Write ''run_in=5 minutes'', or leave it out for a job that is due at once.'
    ];
end;
$$;

comment on function pgqueue._check_run_in(text) is 'Refuses a text that is no delay.';

create or replace function pgqueue._check_row_types(relation oid)
    returns text[]
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
begin
    return (
        with recursive within as (
            select a.atttypid as id
            from pg_attribute as a
            where a.attrelid = relation and a.attnum > 0 and a.atttypid >= 16384
            union
            select n.id
            from within as w
            join pg_type as t on t.oid = w.id
            cross join lateral (
                select t.typelem
                union all
                select t.typbasetype
                union all
                select a.atttypid from pg_attribute as a where a.attrelid = t.typrelid and a.attnum > 0
            ) as n (id)
            where n.id >= 16384
        )
        select array[
            format('enqueue_row does not read the type %s', format_type(t.oid, null)),
            format('It belongs to %s, who may give it a cast to json that runs as %s.', t.typowner::regrole, current_user),
            format('Give it to one who may be trusted: alter type … owner to %I.', current_user),
            '42501'
        ]
        from within as w
        join pg_type as t on t.oid = w.id
        where not pg_has_role(t.typowner, current_user, 'member')
        limit 1
    );
end;
$$;

comment on function pgqueue._check_row_types(oid) is
'Refuses a table with a type of somebody who could not act as the owner of
pgqueue anyway (42501).';

create or replace function pgqueue._prepare_rows(
    relation oid, name text, fires text, level text, op text, arguments text[], options jsonb,
    out problem text[], out others text[], out unwatched text[], out unkeyed text[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    columns text[];
    has_types boolean;
    trigger record;
begin
    select array_agg(a.attname::text), bool_or(a.atttypid >= 16384) into columns, has_types
    from pg_attribute as a
    where a.attrelid = relation and a.attnum > 0 and not a.attisdropped;
    if level = 'STATEMENT' then
        select t.tgoldtable, t.tgnewtable into trigger
        from pg_trigger as t
        where t.tgrelid = relation and t.tgname = name;
        problem := pgqueue._check_row_tables(op, trigger.tgoldtable, trigger.tgnewtable, options);
    end if;
    problem := coalesce(
        problem,
        case when fires <> 'AFTER' then array[
            'enqueue_row needs a trigger AFTER the change',
            format('This one fires %s %s.', fires, op),
            'What comes first may still change, or never happen.'
        ] end,
        pgqueue._check_row_options(arguments, options, columns),
        case when has_types then pgqueue._check_row_types(relation) end
    );
    others := case when options ? 'columns' then pgqueue._but(columns, options ->> 'columns') else '{}' end;
    unwatched := case when options ? 'when_changed' then pgqueue._but(columns, options ->> 'when_changed') end;
    unkeyed := case when options ? 'key' then pgqueue._but(columns, options ->> 'key') end;
end;
$$;

comment on function pgqueue._prepare_rows(oid, text, text, text, text, text[], jsonb) is
'What is wrong with a trigger; the columns that no payload has, those that are
not watched, and those that are no key.';

create or replace function pgqueue._enqueue_changes(
    options jsonb, relation text, op text, others text[], unwatched text[], olds jsonb[], news jsonb[]
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    run_at timestamptz := clock_timestamp() + (options ->> 'run_in')::interval;
    change record;
begin
    select
        array_agg(
            jsonb_build_object(
                'table', relation, 'op', op, 'old', c.old - others, 'new', c.new - others
            )
            order by c.place
        ) as payloads,
        array_agg(nullif(coalesce(c.new, c.old) ->> (options ->> 'unique_key'), '') order by c.place) as unique_keys,
        array_agg(nullif(coalesce(c.new, c.old) ->> (options ->> 'group_key'), '') order by c.place) as group_keys
    into change
    from unnest(olds, news) with ordinality as c (old, new, place)
    where not options ? 'when_changed' or (c.old - unwatched) is distinct from (c.new - unwatched);
    if cardinality(change.payloads) = 1 then
        perform pgqueue.enqueue(
            options ->> 'queue', change.payloads[1], options ->> 'kind', (options ->> 'priority')::int, run_at,
            unique_key => change.unique_keys[1], on_duplicate => options ->> 'on_duplicate',
            group_key => change.group_keys[1]
        );
    elsif change.payloads is not null then
        perform count(*) from pgqueue.enqueue_many(
            options ->> 'queue', change.payloads, options ->> 'kind', (options ->> 'priority')::int, run_at,
            unique_keys => case when options ? 'unique_key' then change.unique_keys end,
            on_duplicate => options ->> 'on_duplicate',
            group_keys => case when options ? 'group_key' then change.group_keys end
        );
    end if;
end;
$$;

comment on function pgqueue._enqueue_changes(jsonb, text, text, text[], text[], jsonb[], jsonb[]) is
'Enqueues a job for each pair of an old and a new row that differ in a column
that is watched. others are the columns that no payload has.';

create or replace function pgqueue.enqueue_row()
    returns trigger
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_hashagg = off
    set enable_hashjoin = on
    -- What is in a payload or a key does not depend on who writes the row.
    set timezone = 'UTC'
    set datestyle = 'ISO, YMD'
    set intervalstyle = 'postgres'
    set bytea_output = 'hex'
    set extra_float_digits = 1
    set lc_monetary = 'C'
as $$
declare
    options jsonb := pgqueue._row_options(tg_argv);
    relation text := coalesce(pg_partition_root(tg_relid), tg_relid::regclass)::text;
    problem text[];
    others text[];
    unwatched text[];
    unkeyed text[];
    changes refcursor;
    change record;
    refused boolean;
begin
    select * into problem, others, unwatched, unkeyed
    from pgqueue._prepare_rows(tg_relid, tg_name, tg_when, tg_level, tg_op, tg_argv, options);
    refused := pgqueue._refuse(problem);

    if tg_level = 'ROW' then
        perform pgqueue._enqueue_changes(
            options, relation, tg_op, others, unwatched, array[to_jsonb(old)], array[to_jsonb(new)]
        );
        return null;
    end if;

    -- In batches, because an array has at most 1 GB.
    if tg_op = 'DELETE' then
        open changes for
        select
            array_agg(o.row order by o.place) as olds, array_fill(null::jsonb, array[count(*)::int]) as news,
            true as is_key
        from (select to_jsonb(r) as row, row_number() over () as place from old_rows as r) as o
        group by (o.place - 1) / 10000;
    elsif tg_op = 'UPDATE' and options ? 'key' then
        open changes for
        select
            array_agg(o.row order by n.place) as olds, array_agg(n.row order by n.place) as news,
            count(*) = count(distinct n.place) as is_key
        from (select to_jsonb(r) as row, row_number() over () as place from new_rows as r) as n
        -- A full join is never a nested loop, which a plan made for few rows might have.
        full join (select to_jsonb(r) as row from old_rows as r) as o on o.row - unkeyed = n.row - unkeyed
        where coalesce(n.place, 0) > 0
        group by (n.place - 1) / 10000;
    else
        open changes for
        select
            array_fill(null::jsonb, array[count(*)::int]) as olds, array_agg(n.row order by n.place) as news,
            true as is_key
        from (select to_jsonb(r) as row, row_number() over () as place from new_rows as r) as n
        group by (n.place - 1) / 10000;
    end if;
    loop
        fetch changes into change;
        exit when not found;
        if not change.is_key then
            refused := pgqueue._refuse(array[
                'the key of a trigger must tell its rows apart',
                format('Two rows of %s have the same %s.', relation, options ->> 'key'),
                'Name the columns of the primary key.'
            ]);
        end if;
        perform pgqueue._enqueue_changes(
            options, relation, tg_op, others, unwatched, change.olds, change.news
        );
    end loop;
    close changes;
    return null;
end;
$$;

comment on function pgqueue.enqueue_row() is
'For a trigger AFTER INSERT, UPDATE or DELETE: a job for each changed row, in the
transaction of the change. Arguments: queue=, and perhaps kind=, priority=,
run_in=, on_duplicate=, columns= (those in the payload; default all),
when_changed= (an UPDATE counts only if one of these changes), unique_key= and
group_key= (a column each). Payload: table, op, new and old; what there is not
is null. For each statement it needs the tables old_rows and new_rows, and for
old rows of an UPDATE key= (columns of the primary key). What enqueue refuses
undoes the change.
Raises 22023 (bad argument or trigger), 42501 (a type of somebody who is not
trusted).';
