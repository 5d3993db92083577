-- First in the scripts without the extension: Postgres knows by itself which script fits an extension.
set local search_path = pg_catalog, pg_temp;

do $$
declare
    upgrades constant text := nullif('@FROM@', '');
    -- Read, and not called: whoever may create schemas may have made one of this name.
    found constant text := (
        select substring(p.prosrc from '''([0-9.]+)''')
        from pg_proc as p
        where p.oid = to_regprocedure('pgqueue.version()')
    );
    way text;
begin
    if exists (select from pg_extension where extname = 'pgqueue') then
        raise exception using
            errcode = 'object_not_in_prerequisite_state',
            message = 'pgqueue already exists in this database, as an extension',
            hint = 'To upgrade it: alter extension pgqueue update';
    end if;
    if found is not distinct from upgrades then
        return;
    end if;
    way := case
        when found is null then 'To install it, run pgqueue--@VERSION@.plain.sql.'
        when found = '@VERSION@' then 'There is nothing to do.'
        when string_to_array(found, '.')::int[] > string_to_array('@VERSION@', '.')::int[]
            then 'There is no way back to an older version but a backup.'
        else format('To upgrade it, run pgqueue--%s--@VERSION@.plain.sql.', found)
    end;
    raise exception using
        errcode = 'object_not_in_prerequisite_state',
        message = case
            when found is null then 'pgqueue is not in this database'
            else format('pgqueue %s already exists in this database', found)
        end,
        detail = case
            when upgrades is null then 'This script installs @VERSION@.'
            else format('This script upgrades %s to @VERSION@.', upgrades)
        end,
        hint = way;
end;
$$;
