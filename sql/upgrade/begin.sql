-- An upgrade, first: what it shall keep. What follows are the changes of tables, and then everything else anew.
set local search_path = pg_catalog, pg_temp;

do $$
declare
    owner constant regrole := (select n.nspowner from pg_namespace as n where n.nspname = 'pgqueue');
    given record;
    entitled text[] := '{}';
begin
    -- Whoever runs this: what is new has to have the owner of the functions that use it. What the transaction does
    -- afterwards is again for the role that runs this.
    perform set_config('pgqueue.upgraded_by', current_setting('role'), true);
    execute format('set local role %s', owner);
    -- Everybody who reads a view is waited for now, when nothing is locked that jobs need: to replace it takes the
    -- same lock as this, which changes nothing.
    for given in
        select c.oid::regclass as name
        from pg_class as c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v' and c.relowner = owner
        order by c.relname
    loop
        execute format('alter view %s owner to %s', given.name, owner);
    end loop;
    -- For access, which takes the rights on what is new from PUBLIC.
    perform set_config('pgqueue.kept', array(
        select 'relation ' || c.oid from pg_class as c where c.relnamespace = 'pgqueue'::regnamespace
        union all
        select 'routine ' || p.oid from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace
    )::text, true);
    -- Which roles have all that their kind of access includes, and will have what is new to it. Of some, somebody has
    -- revoked a part; others have only the name of a role that had it.
    for given in
        with kind as materialized (
            select k.name, array(select s.object::name from pgqueue._grants(k.name) as s) as objects
            from (select distinct d.kind from pgqueue.access as d) as k (name)
        ), rights as materialized (
            -- For all roles at once, which may be many.
            select r.rolname, array_agg(o.name) as objects
            from (
                select p.proname, p.proacl from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace
                union all
                select c.relname, c.relacl from pg_class as c where c.relnamespace = 'pgqueue'::regnamespace
            ) as o (name, acl)
            -- As a new value, see _in_memory.
            cross join lateral aclexplode(case when o.acl is not null then o.acl || '{}'::aclitem[] end) as a
            join pg_roles as r on r.oid = a.grantee
            group by r.rolname
        )
        select a.role, a.kind, k.objects <@ r.objects as has_all
        from (select distinct d.role, d.kind from pgqueue.access as d) as a
        join kind as k on k.name = a.kind
        join rights as r on r.rolname = a.role
        where k.objects && r.objects
    loop
        if given.has_all then
            entitled := entitled || format('%I %s', given.role, given.kind);
        else
            raise warning using
                message = format(
                    'role %I lacks some rights of the kind %s, and does not get those that are new', given.role, given.kind
                ),
                hint = format('To give it all of them: select pgqueue.grant_access(%L, %L)', given.role, given.kind);
        end if;
    end loop;
    perform set_config('pgqueue.entitled', entitled::text, true);
end;
$$;
