-- A job for each change of a table: enqueue_row() is the function of a trigger, and the arguments of
-- that say what to enqueue. It is the only function that meets rows, names and types of strangers, and
-- it has the rights of its owner. So
-- - it reads transition tables only if the trigger has them: else a view of that name in pg_temp would
--   be read;
-- - to_jsonb() sees no value of a type whose cast to json is a stranger's, because it would call that:
--   _as_json() puts the text of the value in its place;
-- - a row becomes a text by concat(), which knows no casts, and never by ::text;
-- - a transaction that sees the catalog as it was, and the rows as they are, is refused;
-- - where columns are in scope every variable is qualified: a column may have any name.

create or replace function pgqueue._check_row_tables(op text, old_table text, new_table text, options jsonb)
    returns text[]
    language plpgsql
    immutable
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
                format(
                    'The old table is %s, the new one %s.',
                    coalesce(old_table, 'missing'), coalesce(new_table, 'missing')
                ),
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
as $$
begin
    return string_to_array(replace(replace(list, ', ', ','), ' ,', ','), ',');
end;
$$;

comment on function pgqueue._names(text) is
'The columns in an argument of a trigger, such as columns=id,state.';

create or replace function pgqueue._but(columns text[], list text)
    returns text[]
    language plpgsql
    immutable
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
as $$
declare
    known text[] := array[
        'queue', 'kind', 'columns', 'when_changed', 'key', 'unique_key', 'on_duplicate', 'group_key',
        'priority', 'run_in'
    ];
    named text[] := array_remove(
        pgqueue._names(concat_ws(',', options ->> 'columns', options ->> 'when_changed', options ->> 'key'))
            || array[options ->> 'unique_key', options ->> 'group_key'],
        null
    );
begin
    return case
        when options - known <> '{}'
            or '' in (options ->> 'columns', options ->> 'when_changed', options ->> 'key')
            then array[
                'every argument of enqueue_row must be a known name, once, with a value',
                format('They are %s.', array_to_string(arguments, ', ')),
                format('The names are %s. Write ''queue=emails''.', array_to_string(known, ', '))
            ]
        when not named <@ columns then array[
            'the table lacks a column that an argument of enqueue_row names',
            format('%s of %s.', (
                select string_agg('"' || n.name || '"', ', ')
                from unnest(named) as n (name)
                where n.name <> all (columns)
            ), array_to_string(columns, ', ')),
            'Write names as the catalog has them, without quotes, separated by commas.'
        ]
        when options ->> 'priority' !~ '^-?[0-9]{1,3}$' then array[
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

create or replace function pgqueue._row_types(relation oid)
    returns table (name text, id oid, is_array boolean, is_inside boolean)
    language plpgsql
    stable
as $$
begin
    return query
    with recursive within as (
        select a.attname::text as name, a.atttypid as id, false as is_array, false as is_inside
        from pg_attribute as a
        where a.attrelid = relation and a.attnum > 0 and a.atttypid >= 16384
        union
        select w.name, n.id, n.is_array, w.is_inside or not n.is_array
        from within as w
        join pg_type as t on t.oid = w.id
        cross join lateral (
            select t.typelem, true
            union all
            select t.typbasetype, false
            union all
            select a.atttypid, false from pg_attribute as a where a.attrelid = t.typrelid and a.attnum > 0
        ) as n (id, is_array)
        where n.id >= 16384
    )
    select w.name, w.id, w.is_array, w.is_inside from within as w;
end;
$$;

comment on function pgqueue._row_types(oid) is
'The types in the columns of a table that Postgres does not bring: whether as the
element of an array, and whether inside of a domain or a composite type.';

create or replace function pgqueue._strange_types(relation oid)
    returns table (name text, id oid, is_array boolean, is_text boolean, stranger oid)
    language plpgsql
    stable
as $$
begin
    return query
    select w.name, w.id, w.is_array, not w.is_inside and t.typtype in ('e', 'r', 'm'), s.id
    from pgqueue._row_types(relation) as w
    join pg_type as t on t.oid = w.id
    cross join lateral (
        select t.typowner
        union all
        -- A former owner may have left a cast behind.
        select p.proowner
        from pg_cast as c
        join pg_proc as p on p.oid = c.castfunc
        where c.castsource = t.oid and c.casttarget = 'json'::regtype
    ) as s (id)
    -- to_jsonb() looks through domains and arrays, and calls no cast of theirs.
    where t.typtype <> 'd' and t.typsubscript <> 'array_subscript_handler'::regproc
        and not pg_has_role(s.id, current_user, 'member');
end;
$$;

comment on function pgqueue._strange_types(oid) is
'The types of a table whose cast to json may be the work of a stranger: one who
could not act as the owner of pgqueue anyway. is_text: without a cast to_jsonb
would make a text of it.';

create or replace function pgqueue._check_row_types(relation oid)
    returns text[]
    language plpgsql
    stable
as $$
begin
    return (
        select array[
            format('enqueue_row does not read the type %s of column "%s"', format_type(s.id, null), s.name),
            format('%s may give it a cast to json that runs as %s.', s.stranger::regrole, current_user),
            format(
                'Give the type and its cast to one who may be trusted: alter type ... owner to %I.',
                current_user
            ),
            '42501'
        ]
        from pgqueue._strange_types(relation) as s
        where not s.is_text
        limit 1
    );
end;
$$;

comment on function pgqueue._check_row_types(oid) is
'Refuses a table with a type of a stranger, unless it is an enum, a range or an
array of these (42501).';

create or replace function pgqueue._check_row_snapshot(relation oid, name text)
    returns text[]
    language plpgsql
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    -- currtid2() finds the newest version of a row, whatever this transaction sees.
    if (select c.ctid = currtid2('pg_catalog.pg_class', c.ctid) from pg_class as c where c.oid = relation)
        and (
            -- Of a trigger that was dropped there is no newer version.
            select t.ctid = currtid2('pg_catalog.pg_trigger', t.ctid) and pg_get_triggerdef(t.oid) is not null
            from pg_trigger as t
            where t.tgrelid = relation and t.tgname = name
        )
        and not exists (
            select from pg_attribute as a
            where a.attrelid = relation and a.attnum > 0
                and a.ctid <> currtid2('pg_catalog.pg_attribute', a.ctid)
        )
        and not exists (
            select from pgqueue._row_types(relation) as w
            join pg_type as t on t.oid = w.id
            where t.ctid <> currtid2('pg_catalog.pg_type', t.ctid)
        )
    then
        return null;
    end if;
    return array[
        format('the table %s has changed since this transaction began', relation::regclass),
        'A transaction that is not READ COMMITTED does not see how.',
        'Begin the transaction again.',
        '40001'
    ];
end;
$$;

comment on function pgqueue._check_row_snapshot(oid, text) is
'Refuses a change whose transaction sees an older version of the table, of its
types or of the trigger than that which is in force (40001).';

create or replace function pgqueue._row_texts(relation oid, out problem text[], out texts pgqueue._texts)
    language plpgsql
    stable
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    is_text boolean;
begin
    select bool_and(s.is_text), array_agg(s.name) filter (where s.is_array), jsonb_object_agg(s.name, null)
    into is_text, texts.arrays, texts.hidden
    from pgqueue._strange_types(relation) as s;
    if not is_text then
        problem := pgqueue._check_row_types(relation);
    elsif is_text then
        -- No domain may be among them: its CHECK would run, with the rights of our owner.
        select
            array_agg(a.attname::text order by a.attnum),
            jsonb_object_agg(a.attname, null) filter (where t.typtype <> 'd' and not texts.hidden ? a.attname)
        into texts.columns, texts.others
        from pg_attribute as a
        join pg_type as t on t.oid = a.atttypid
        where a.attrelid = relation and a.attnum > 0;
    end if;
end;
$$;

comment on function pgqueue._row_texts(oid) is
'How to read rows in which to_jsonb must not see every column; nulls where it
may. What is wrong if there is no way.';

create or replace function pgqueue._as_json(given record, texts pgqueue._texts)
    returns jsonb
    language plpgsql
    stable
    set array_nulls = on
as $$
declare
    -- As record_out() writes it: a field that has more than plain letters stands in quotes, and each
    -- quote or backslash in it twice; null is nothing.
    fields text := concat(jsonb_populate_record(given, coalesce(texts.others, '{}')));
begin
    return to_jsonb(jsonb_populate_record(given, texts.hidden)) || (
        select jsonb_object_agg(
            c.name,
            case when c.name = any (texts.arrays) then to_jsonb(v.value::text[]) else to_jsonb(v.value) end
        )
        from regexp_matches(
            substr(fields, 2, length(fields) - 2) || ',', '(?:"((?:[^"]|"")*)"|([^",]*)),', 'g'
        ) with ordinality as f (parts, place)
        join unnest(texts.columns) with ordinality as c (name, place) using (place)
        cross join lateral (
            select coalesce(
                replace(replace(f.parts[1], '""', '"'), E'\\\\', E'\\'), nullif(f.parts[2], '')
            )
        ) as v (value)
        where texts.hidden ? c.name
    );
end;
$$;

comment on function pgqueue._as_json(record, pgqueue._texts) is
'What to_jsonb makes of a row, but calling no cast of a stranger.';

create or replace function pgqueue._prepare_rows(
    relation oid, name text, fires text, level text, op text, arguments text[], options jsonb,
    out problem text[], out others text[], out unwatched text[], out unkeyed text[], out texts pgqueue._texts
)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    columns text[];
    has_types boolean;
    trigger record;
    reading record;
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
    if has_types then
        select r.* into reading from pgqueue._row_texts(relation) as r;
        texts := reading.texts;
        problem := coalesce(problem, reading.problem);
    end if;
    problem := coalesce(
        case when current_setting('transaction_isolation') <> 'read committed'
            then pgqueue._check_row_snapshot(relation, name)
        end,
        problem,
        case when fires <> 'AFTER' then array[
            'enqueue_row needs a trigger AFTER the change',
            format('This one fires %s %s.', fires, op),
            'What comes first may still change, or never happen.'
        ] end,
        pgqueue._check_row_options(arguments, options, columns)
    );
    others := case when options ? 'columns' then pgqueue._but(columns, options ->> 'columns') else '{}' end;
    unwatched := case when options ? 'when_changed' then pgqueue._but(columns, options ->> 'when_changed') end;
    unkeyed := case when options ? 'key' then pgqueue._but(columns, options ->> 'key') end;
end;
$$;

comment on function pgqueue._prepare_rows(oid, text, text, text, text, text[], jsonb) is
'What is wrong with a trigger; the columns that no payload has, those that are
not watched, and those that are no key; how to read its rows.';

create or replace function pgqueue._enqueue_changes(
    options jsonb, relation text, op text, others text[], unwatched text[], olds jsonb[], news jsonb[]
)
    returns void
    language plpgsql
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
        array_agg(nullif(k.row ->> (options ->> 'unique_key'), '') order by c.place) as unique_keys,
        array_agg(nullif(k.row ->> (options ->> 'group_key'), '') order by c.place) as group_keys
    into change
    from unnest(olds, news) with ordinality as c (old, new, place)
    cross join lateral (select coalesce(c.new, c.old)) as k (row)
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
    set enable_hashjoin = on
    -- What is in a payload or a key does not depend on who writes the row.
    set timezone = 'UTC'
    set datestyle = 'ISO, YMD'
    set intervalstyle = 'postgres'
    set bytea_output = 'hex'
    set extra_float_digits = 1
    set lc_monetary = 'C'
    set quote_all_identifiers = off
as $$
declare
    options jsonb := pgqueue._row_options(tg_argv);
    relation text := coalesce(pg_partition_root(tg_relid), tg_relid::regclass)::text;
    prepared record;
    changes refcursor;
    change record;
    last_place bigint := 0;
    olds jsonb[] := '{}'::jsonb[];
    news jsonb[] := '{}'::jsonb[];
    bytes bigint := 0;
    is_end boolean;
    refused boolean;
begin
    select p.* into prepared
    from pgqueue._prepare_rows(tg_relid, tg_name, tg_when, tg_level, tg_op, tg_argv, options) as p;
    refused := pgqueue._refuse(prepared.problem);

    if tg_level = 'ROW' then
        perform pgqueue._enqueue_changes(
            options, relation, tg_op, prepared.others, prepared.unwatched,
            array[case
                when prepared.texts is null then to_jsonb(old)
                when tg_op <> 'INSERT' then pgqueue._as_json(old, prepared.texts)
            end],
            array[case
                when prepared.texts is null then to_jsonb(new)
                when tg_op <> 'DELETE' then pgqueue._as_json(new, prepared.texts)
            end]
        );
        return null;
    end if;

    if tg_op = 'DELETE' then
        open changes for
        select r.row as old, null::jsonb as new, r.place
        from (
            select
                case when prepared.texts is null then to_jsonb(r.*)
                    else pgqueue._as_json(r.*, prepared.texts)
                end as row,
                row_number() over () as place
            from old_rows as r
        ) as r;
    elsif tg_op = 'UPDATE' and options ? 'key' then
        open changes for
        select o.row as old, n.row as new, n.place
        from (
            select
                case when prepared.texts is null then to_jsonb(r.*)
                    else pgqueue._as_json(r.*, prepared.texts)
                end as row,
                row_number() over () as place
            from new_rows as r
        ) as n
        -- A full join is never a nested loop, which a plan made for few rows might have.
        full join (
            select
                case when prepared.texts is null then to_jsonb(r.*)
                    else pgqueue._as_json(r.*, prepared.texts)
                end as row
            from old_rows as r
        ) as o on o.row - prepared.unkeyed = n.row - prepared.unkeyed
        where coalesce(n.place, 0) > 0
        order by n.place;
    else
        open changes for
        select null::jsonb as old, r.row as new, r.place
        from (
            select
                case when prepared.texts is null then to_jsonb(r.*)
                    else pgqueue._as_json(r.*, prepared.texts)
                end as row,
                row_number() over () as place
            from new_rows as r
        ) as r;
    end if;
    loop
        fetch changes into change;
        is_end := not found;
        -- In batches of at most 10,000, because an array has at most 1 GB.
        if is_end or bytes >= 16000000 then
            perform pgqueue._enqueue_changes(
                options, relation, tg_op, prepared.others, prepared.unwatched, olds, news
            );
            olds := '{}';
            news := '{}';
            bytes := 0;
        end if;
        exit when is_end;
        if change.place = last_place then
            refused := pgqueue._refuse(array[
                'the key of a trigger must tell its rows apart',
                format('Two rows of %s have the same %s.', relation, options ->> 'key'),
                'Name the columns of the primary key.'
            ]);
        end if;
        last_place := change.place;
        olds := array_append(olds, change.old);
        news := array_append(news, change.new);
        bytes := bytes + 1600
            + coalesce(pg_column_size(change.old), 0) + coalesce(pg_column_size(change.new), 0);
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
undoes the change. A cast to json counts only if it is of one who is trusted.
Raises 22023 (bad argument or trigger), 42501 (a domain or a composite with a
type of somebody who is not trusted).';
