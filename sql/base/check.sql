-- Checks of arguments, and how a call is refused.
--
-- A check returns what is wrong (message, detail, hint, and the SQLSTATE if it is not 22023), or null. _refuse()
-- raises it. Public functions call it in an assignment, which adds no line of its own to the CONTEXT of the error, so
-- psql shows only two: "_refuse" and the function that was called. A list of checks therefore reads
--
--     refused boolean := pgqueue._refuse(coalesce(pgqueue._check_this(...), pgqueue._check_that(...)));
--
-- Only the checks of access, batches and ids of jobs read a table.

-- Raises the error that a check has found; null raises nothing.
create or replace function pgqueue._refuse(problem text[])
    returns boolean
    language plpgsql
as $$
begin
    if problem is not null then
        raise exception using
            errcode = coalesce(problem[4], '22023'),
            message = problem[1],
            detail = problem[2],
            hint = problem[3];
    end if;
    return false;
end;
$$;

-- What is wrong with the name of a queue, kind, key or worker that is empty, too long or null.
create or replace function pgqueue._bad_name(what text, name text)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return array[
        format('%s must be a text of 1 to 200 bytes', what),
        coalesce('It has ' || octet_length(name) || ' bytes.', 'It is null.'),
        'Use a short name; content belongs in the payload.'
    ];
end;
$$;

-- Refuses an array that does not name queues.
create or replace function pgqueue._check_queues(queues text[])
    returns text[]
    language plpgsql
    immutable
as $$
begin
    if coalesce(cardinality(queues), 0) = 0 or array_ndims(queues) > 1 then
        return array[
            'queues must be an array of one or more names',
            coalesce('It has ' || array_ndims(queues) || ' dimensions.', 'It is null or empty.'),
            'Write array[''emails''].'
        ];
    end if;
    return (
        select pgqueue._bad_name('every queue', q.name)
        from unnest(queues) as q (name)
        where (octet_length(q.name) between 1 and 200) is not true
        limit 1
    );
end;
$$;

-- Refuses a number or a time that is out of range, or an incomplete pattern; null passes.
create or replace function pgqueue._check_ranges(
    priority int default null, run_at timestamptz default null, lease interval default null, max_jobs int default null,
    error_like text default null
)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return case
        when priority not between -100 and 100 then array[
            'priority must be -100 to 100', format('It is %s.', priority),
            'Larger runs first; the default is 0. Use run_at or another queue for finer ordering.'
        ]
        when run_at not between '1970-01-01' and '9998-12-31' then array[
            'run_at must be between the years 1970 and 9998', format('It is %s.', run_at),
            'Omit run_at for a job that is due at once.'
        ]
        when lease <= '0' or lease > '30 days' then array[
            'lease must be more than 0 and at most 30 days', format('It is %s.', lease),
            'Use a short lease and extend it while the job runs.'
        ]
        when max_jobs < 1 then array[
            'max_jobs must be at least 1', format('It is %s.', max_jobs), 'Omit it for 1000.'
        ]
        when (length(error_like) - length(rtrim(error_like, chr(92)))) % 2 = 1 then array[
            'error_like must not end with the escape character', format('It is "%s".', error_like),
            'For a backslash, write two of them.'
        ]
    end;
end;
$$;

-- Refuses arguments that enqueue cannot take; null passes, except for the queue.
create or replace function pgqueue._check_job(
    queue text, kind text, priority int, run_at timestamptz, max_attempts int, unique_key text, on_duplicate text,
    group_key text, headers jsonb, unique_for interval default null, expires_at timestamptz default null
)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return case
        when (octet_length(queue) between 1 and 200) is not true then pgqueue._bad_name('queue', queue)
        when octet_length(kind) not between 1 and 200 then pgqueue._bad_name('kind', kind)
        when octet_length(unique_key) not between 1 and 200 then pgqueue._bad_name('unique_key', unique_key)
        when octet_length(group_key) not between 1 and 200 then pgqueue._bad_name('group_key', group_key)
        when max_attempts < 1 then array[
            'max_attempts must be at least 1', format('It is %s.', max_attempts),
            'Use 1 for a job that must not be tried again.'
        ]
        when on_duplicate not in ('skip', 'replace', 'postpone', 'error') then array[
            'on_duplicate must be skip, replace, postpone or error', format('It is "%s".', on_duplicate),
            'Omit it to skip: the id of the existing job is returned.'
        ]
        when jsonb_typeof(headers) <> 'object' then array[
            'headers must be a JSON object', format('It is a JSON %s.', jsonb_typeof(headers)),
            'Put other content in the payload.'
        ]
        when unique_for <= '0' or unique_for > '366 days' then array[
            'unique_for must be more than 0 and at most 366 days', format('It is %s.', unique_for),
            'Omit it if the unique_key is to hold only while its job waits or runs.'
        ]
        when unique_for is not null and unique_key is null then array[
            'unique_for needs a unique_key',
            'unique_key is null.',
            'Give a key for what may be enqueued only once in that time.'
        ]
        when expires_at not between '1970-01-01' and '9998-12-31' then array[
            'expires_at must be between the years 1970 and 9998', format('It is %s.', expires_at),
            'Omit it for a job that may begin at any time.'
        ]
        when num_nonnulls(priority, run_at) > 0 then pgqueue._check_ranges(priority, run_at)
        when headers is not null then pgqueue._check_length('headers', headers)
    end;
end;
$$;

-- Refuses a value that no client could read, because Postgres makes no text of 1 GB: the claim of such a job would fail,
-- and nothing in its queue would run (54000). A number like 1e131071 takes a dozen bytes.
create or replace function pgqueue._check_length(what text, value jsonb)
    returns text[]
    language plpgsql
    immutable
as $$
declare
    bytes int;
begin
    -- As an element of an array it is uncompressed; as a value of a table it may not be.
    if (pg_column_size((array[value])[1]) > 65536) is not true then
        return null;
    end if;
    begin
        bytes := octet_length(value::text);
    exception when program_limit_exceeded or out_of_memory then
        null;
    end;
    return case when (bytes <= 400000000) is not true then array[
        what || ' is too long as text',
        format('It has %s bytes of at most 400000000.', coalesce(bytes::text, 'more than 1000000000')),
        'A number such as 1e100000 has as many digits: pass it as a string.', '54000'
    ] end;
end;
$$;

-- Refuses a payload above the queue's max_payload_bytes (54000; a null limit is none), or one that is too long.
create or replace function pgqueue._check_payload(payload jsonb, max_bytes int)
    returns text[]
    language plpgsql
    immutable
as $$
declare
    -- As an element of an array it is uncompressed; as a value of a table it may not be.
    bytes int := pg_column_size((array[payload])[1]);
begin
    return case when bytes > max_bytes then array[
        'payload is too large for this queue',
        format('It has %s bytes of at most %s.', bytes, max_bytes),
        'Store large content elsewhere and enqueue its location, or configure max_payload_bytes.',
        '54000'
    ] else pgqueue._check_length('payload', payload) end;
end;
$$;

-- Refuses arrays that enqueue_many cannot take.
create or replace function pgqueue._check_many(payloads jsonb[], unique_keys text[], group_keys text[], max_bytes int[])
    returns text[]
    language plpgsql
    immutable
as $$
begin
    if payloads is null or array_ndims(payloads) > 1 then
        return array[
            'payloads must be an array of one dimension',
            coalesce('It has ' || array_ndims(payloads) || ' dimensions.', 'It is null.'),
            'Pass one payload for each job.'
        ];
    elsif cardinality(unique_keys) <> cardinality(payloads) or cardinality(group_keys) <> cardinality(payloads) then
        return array[
            'unique_keys and group_keys must be as long as payloads',
            format(
                'There are %s payloads, %s unique keys and %s group keys.',
                cardinality(payloads),
                coalesce(cardinality(unique_keys), 0), coalesce(cardinality(group_keys), 0)
            ),
            'Use null for a job without a key.'
        ];
    end if;
    return coalesce(
        (
            select pgqueue._bad_name('every unique_key and group_key', k.name)
            from (select unnest(unique_keys) union all select unnest(group_keys)) as k (name)
            where octet_length(k.name) not between 1 and 200
            limit 1
        ),
        case when num_nonnulls(variadic max_bytes) > 0 or pg_column_size(payloads || '{}'::jsonb[]) > 65536 then (
            select c.problem
            from unnest(payloads, max_bytes) as given (payload, max_bytes)
            cross join lateral (
                select pgqueue._check_payload(given.payload, given.max_bytes) as problem offset 0
            ) as c
            where pg_column_size(given.payload) > least(given.max_bytes, 65536) and c.problem is not null
            limit 1
        ) end
    );
end;
$$;

-- Refuses an isolation level other than READ COMMITTED (25001). Some callers check it themselves first, which is
-- cheaper than a call.
create or replace function pgqueue._check_isolation()
    returns text[]
    language plpgsql
    stable
as $$
begin
    return case when current_setting('transaction_isolation') <> 'read committed' then array[
        'leases need the isolation level READ COMMITTED',
        format('This transaction is %s.', upper(current_setting('transaction_isolation'))),
        'An older snapshot cannot see who holds a lease now. Use BEGIN ISOLATION LEVEL READ COMMITTED '
        'or, in autocommit, set default_transaction_isolation = ''read committed''.',
        '25001'
    ] end;
end;
$$;

-- Refuses arguments that claim cannot take, an isolation level other than READ COMMITTED (25001), and a
-- read-only transaction (25006).
create or replace function pgqueue._check_claim(queue text, worker text, max_jobs int, lease interval)
    returns text[]
    language plpgsql
as $$
begin
    return case
        when current_setting('transaction_isolation') <> 'read committed' then pgqueue._check_isolation()
        -- Finding no jobs would hide the mistake.
        when current_setting('transaction_read_only') = 'on' then array[
            'cannot claim in a read-only transaction',
            case when pg_is_in_recovery()
                then 'This server is a standby.'
                else 'This transaction is READ ONLY, or this session or server is by default.'
            end,
            'Work on the primary, in a transaction that may write.',
            '25006'
        ]
        when (octet_length(queue) between 1 and 200) is not true then pgqueue._bad_name('queue', queue)
        when (octet_length(worker) between 1 and 200) is not true then pgqueue._bad_name('worker', worker)
        when max_jobs not between 1 and 10000 then array[
            'max_jobs must be 1 to 10000', format('It is %s.', max_jobs),
            'Claim what you can begin within one lease.'
        ]
        when lease is not null then pgqueue._check_ranges(lease => lease)
    end;
end;
$$;

-- Refuses arrays of unequal length, and an isolation level other than READ COMMITTED (25001).
create or replace function pgqueue._check_leases(job_ids bigint[], tokens bigint[])
    returns text[]
    language plpgsql
    stable
as $$
begin
    return case
        when current_setting('transaction_isolation') <> 'read committed' then pgqueue._check_isolation()
        when cardinality(job_ids) is distinct from cardinality(tokens) then array[
            'job_ids and tokens must be equally long',
            format(
                'There are %s ids and %s tokens.',
                coalesce(cardinality(job_ids), 0), coalesce(cardinality(tokens), 0)
            ),
            'Pass the token that claim returned for each job.'
        ]
    end;
end;
$$;

-- Says which shard an id comes from if that is not this one; null if it may be from this database.
create or replace function pgqueue._other_shard(id bigint)
    returns text
    language plpgsql
    stable
as $$
begin
    return (
        select format(
            'It is an id of shard %s of %s, and this is shard %s.', (_other_shard.id % s.of + s.of - 1) % s.of + 1, s.of, s.number
        )
        from pgqueue.shard as s
        where _other_shard.id > s.above and _other_shard.id % s.of <> s.number % s.of
    );
end;
$$;

-- What is wrong if nobody holds this lease (PQ002).
create or replace function pgqueue._lost(job_id bigint, token bigint)
    returns text[]
    language plpgsql
    stable
as $$
begin
    return array[
        format('the lease on job %s is lost', coalesce(job_id::text, 'null')),
        concat_ws(
            ' ', format('It is not held under token %s.', coalesce(token::text, 'null')), pgqueue._other_shard(job_id)
        ),
        'The lease expired, or the attempt has already ended. Discard the result: the job may be running elsewhere.',
        'PQ002'
    ];
end;
$$;

-- Refuses an absurd delay; null passes.
create or replace function pgqueue._check_delay(what text, delay interval)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return case when delay < '0' or delay > '1000 years' then array[
        format('%s must be from 0 to 1000 years', what), format('It is %s.', delay),
        'Omit it for the delay that the queue''s settings give.'
    ] end;
end;
$$;

-- Refuses arguments that finish cannot take.
create or replace function pgqueue._check_outcomes(job_ids bigint[], outcomes text[], texts text[], delays interval[])
    returns text[]
    language plpgsql
    immutable
as $$
declare
    known constant text[] := array['complete', 'fail', 'reject', 'release', 'suspend'];
begin
    if cardinality(outcomes) is distinct from cardinality(job_ids)
        or cardinality(texts) <> cardinality(job_ids) or cardinality(delays) <> cardinality(job_ids)
    then
        return array[
            'outcomes, texts and delays must be as long as job_ids',
            format(
                'There are %s ids, %s outcomes, %s texts and %s delays.',
                coalesce(cardinality(job_ids), 0), coalesce(cardinality(outcomes), 0),
                coalesce(cardinality(texts), 0), coalesce(cardinality(delays), 0)
            ),
            'Omit texts or delays if there are none.'
        ];
    elsif (outcomes <@ known) is not true then
        return (
            select array[
                'every outcome must be complete, fail, reject, release or suspend',
                coalesce('One is "' || o.outcome || '".', 'One is null.'),
                'reject is for permanent errors.'
            ]
            from unnest(outcomes) as o (outcome)
            where (o.outcome = any (known)) is not true
            limit 1
        );
    end if;
    return (
        select pgqueue._check_delay('every delay', d.delay)
        from unnest(delays) as d (delay)
        where d.delay < '0' or d.delay > '1000 years'
        limit 1
    );
end;
$$;

-- What is wrong with an id that does not exist, or no longer does (PQ001).
create or replace function pgqueue._not_found(what text, id bigint, hint text default null)
    returns text[]
    language plpgsql
    stable
as $$
begin
    return array[
        format('%s %s not found', what, coalesce(id::text, 'null')),
        concat_ws(' ', format('No %s has this id.', what), pgqueue._other_shard(id)),
        coalesce(hint, case what
            when 'batch' then 'create_batch returns its id; a finished batch is forgotten after 14 days.'
            when 'dead job' then 'It may have been redriven or discarded.'
            else 'Only jobs that wait, run or are dead are known, and those that are still in run.'
        end),
        'PQ001'
    ];
end;
$$;

-- Refuses a bad name of a queue, kind or group, and the group * where it cannot stand for each group; null, which
-- means all, passes.
create or replace function pgqueue._check_scope(queue text, kind text, group_key text, takes_each boolean)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return case
        when octet_length(queue) not between 1 and 200 then pgqueue._bad_name('queue', queue)
        when octet_length(kind) not between 1 and 200 then pgqueue._bad_name('kind', kind)
        when octet_length(group_key) not between 1 and 200 then pgqueue._bad_name('group_key', group_key)
        when group_key = '*' and not takes_each then array[
            'group_key * cannot be paused or resumed apart from its queue',
            'The group_key is *.',
            'Omit group_key, or name one group.'
        ]
    end;
end;
$$;

-- Refuses an unknown kind, a queue for a kind that cannot be limited to one, and a role that does not exist
-- (42704); with is_over, a dropped role passes if it still has access to revoke.
create or replace function pgqueue._check_grant(role text, kind text, queue text, is_over boolean)
    returns text[]
    language plpgsql
    stable
as $$
begin
    return case
        when (kind in ('producer', 'worker', 'scheduler', 'operator', 'reader')) is not true then array[
            'kind must be producer, worker, scheduler, operator or reader',
            coalesce('It is "' || kind || '".', 'It is null.'),
            'A role may have several kinds of access: call once for each.'
        ]
        when octet_length(queue) not between 1 and 200 then pgqueue._bad_name('queue', queue)
        when queue is not null and kind in ('operator', 'reader') then array[
            format('access as %s cannot be limited to a queue', kind),
            format('The queue is "%s".', queue),
            'Omit queue. Only producers, workers and schedulers may be limited.'
        ]
        when not exists (select from pg_roles as r where r.rolname = role)
            and not (is_over and exists (select from pgqueue.access as a where a.role = _check_grant.role)) then array[
            format('role "%s" does not exist', role),
            'Roles belong to the whole cluster, and pgqueue creates none.',
            'CREATE ROLE makes one.',
            '42704'
        ]
    end;
end;
$$;

-- The calling role. Public functions run as their owner, so current_user will not do: it is the role of SET ROLE,
-- or else the role that the session logged in as. But ANALYZE and the like run functions as the owner of a table,
-- in the session of another role. There UNLISTEN, which changes nothing here, is not allowed and raises 42501.
create or replace function pgqueue._caller()
    returns text
    language plpgsql
as $$
begin
    unlisten pgqueue_nobody;
    return coalesce(nullif(current_setting('role'), 'none'), session_user);
end;
$$;

-- A copy, for aclexplode: it would read a long list, which is stored apart, again for each of its rows.
create or replace function pgqueue._in_memory(acl aclitem[])
    returns aclitem[]
    language sql
    immutable
as $$
    select case when acl is not null then acl || '{}'::aclitem[] end
$$;

-- The queues for which the caller has any of these kinds of access; null if it is not limited. Only this function
-- decides which queues a role may use.
create or replace function pgqueue._own_queues(variadic kinds text[])
    returns text[]
    language plpgsql
    set enable_seqscan = off
as $$
declare
    caller name;
    queues text[];
begin
    -- It is one page as long as nobody's access is limited.
    if pg_relation_size('pgqueue.access_queue_idx') <= 8192
        or not exists (select from pgqueue.access as a where a.queue <> '')
    then
        return null;
    end if;
    caller := pgqueue._caller();
    if pg_has_role(caller, current_user, 'usage') then
        return null;
    end if;
    queues := array(
        -- From the caller on: other roles may be thousands. Membership in pg_database_owner is not written down.
        with recursive role (oid) as (
            select r.oid from pg_roles as r where r.rolname in (caller collate "C", 'pg_database_owner')
            union
            select m.roleid from role as o join pg_auth_members as m on m.member = o.oid
        )
        select a.queue
        from role as o
        cross join lateral (select r.rolname from pg_roles as r where r.oid = o.oid offset 0) as r
        cross join lateral (
            select a.queue from pgqueue.access as a where a.role = r.rolname and a.kind = any (kinds) offset 0
        ) as a
        where pg_has_role(caller, o.oid, 'usage')
            -- Without the rights that grant_access has given it, a role only has the name of one that was dropped.
            and o.oid in (
                select g.grantee
                from pg_namespace as n
                cross join lateral aclexplode(pgqueue._in_memory(n.nspacl)) as g
                where n.nspname = 'pgqueue'
            )
    );
    return case when not '' = any (queues) then queues end;
end;
$$;

-- Whether a queue is one of _own_queues. Compared by bytes: under the caller's collation different names may be equal.
create or replace function pgqueue._is_own(queue text, own text[])
    returns boolean
    language sql
    immutable
as $$
    select own is null or queue collate "C" = any (own)
$$;

-- Refuses a caller whose access is limited to other queues (42501).
create or replace function pgqueue._check_access(kind text, queues text[])
    returns text[]
    language plpgsql
as $$
declare
    own text[] := pgqueue._own_queues(kind, case when kind = 'scheduler' then 'operator' end);
begin
    return case when own is not null then (
        select array[
            format('role %I is no %s of queue "%s"', c.caller, kind, q.name),
            case when own = '{}' then format('It is a %s of no queue.', kind)
                else format('It is a %s of %s only.', kind, array_to_string(own, ', '))
            end,
            format('select pgqueue.grant_access(%L, %L, queue => %L) makes it one. ', c.caller, kind, q.name)
                || 'The role of the session counts, even within a security definer function.',
            '42501'
        ]
        from pgqueue._caller() as c (caller)
        cross join unnest(queues) as q (name)
        where not pgqueue._is_own(q.name, own)
        limit 1
    ) end;
end;
$$;

-- Keeps a batch from finishing before this transaction ends. Refuses one that does not exist (PQ001), or
-- has finished (55000).
create or replace function pgqueue._lock_batch(batch_id bigint)
    returns text[]
    language plpgsql
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    own text[] := pgqueue._own_queues('producer');
    batch pgqueue.batch;
begin
    select b.* into batch
    from pgqueue.batch as b
    where b.id = _lock_batch.batch_id and pgqueue._is_own(b.queue, own)
    for key share;
    return case
        when batch.id is null then pgqueue._not_found('batch', batch_id)
        when batch.finished_at is not null then array[
            format('batch %s has finished', batch_id), 'Its callback has been enqueued.',
            'Add jobs before close_batch, or from a running job of the batch.',
            '55000'
        ]
    end;
end;
$$;

-- Refuses ids of jobs that never existed (PQ001), ids of batches, too many ids, and an unknown if_dead; null
-- passes. A job of another shard is known only if it was moved here.
create or replace function pgqueue._check_after(after bigint[], if_dead text)
    returns text[]
    language plpgsql
    -- For a short list, planning it each time would cost several times as much as the rest of an enqueue.
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
as $$
declare
    last_id bigint := coalesce(pg_sequence_last_value('pgqueue.job_id_seq'::regclass), 0);
    unknown bigint := (
        select max(a.id)
        from unnest(after) as a (id)
        where (a.id not between 1 and last_id or pgqueue._other_shard(a.id) is not null)
            and not exists (select from pgqueue.job as j where j.id = a.id offset 0)
            and not exists (select from pgqueue.dead_job as d where d.id = a.id offset 0)
    );
    batch_id bigint := case when cardinality(after) > 0 and pg_relation_size('pgqueue.batch') > 0
        then (select min(b.id) from pgqueue.batch as b where b.id = any (after)) end;
begin
    return case
        when if_dead not in ('cancel', 'run') then array[
            'if_dead must be cancel or run', format('It is "%s".', if_dead),
            'Omit it to have the job cancelled when one that it waits for dies.'
        ]
        when cardinality(after) > 10000 or num_nulls(variadic after) > 0 then array[
            'after must be up to 10000 ids of jobs',
            case when cardinality(after) > 10000
                then format('It has %s.', cardinality(after))
                else 'One of them is null.'
            end,
            'To wait for many jobs, use a batch.'
        ]
        when unknown is not null then pgqueue._not_found('job', unknown, 'after takes ids that enqueue has returned.')
        when batch_id is not null then array[
            'after takes jobs, not batches', format('%s is a batch.', batch_id),
            'The callback of the batch can enqueue what comes after it.'
        ]
    end;
end;
$$;

-- Refuses terms that suspend cannot take. Relies on the planner settings of its callers.
create or replace function pgqueue._check_suspension(
    job_id bigint, event text, run_at timestamptz, after bigint[], step text
)
    returns text[]
    language plpgsql
as $$
declare
    -- One of the jobs in after that can never end before this one, because it waits for it, directly or through
    -- others, and for nothing else. It looks at 1,000 jobs.
    in_turn bigint := case when num_nonnulls(event, run_at) = 0 then (
        with recursive waiter (id) as (
            select _check_suspension.job_id
            union
            select n.waiter_id
            from waiter as w
            cross join lateral (
                select d.waiter_id
                from pgqueue.dependency as d
                cross join lateral (
                    select j.id from pgqueue.job as j
                    where j.id = d.waiter_id and j.run_at = 'infinity' and (j.terms).expires_at is null
                        and not exists (
                            select from pgqueue.wait as e where e.job_id = d.waiter_id and e.event is not null
                        )
                    offset 0
                ) as j
                where d.job_id = w.id
                offset 0
            ) as n
        )
        select w.id from (select w.id from waiter as w limit 1000) as w where w.id = any (after) limit 1
    ) end;
begin
    return case
        when num_nonnulls(event, run_at, after) = 0 then array[
            'a suspended job needs something to wait for',
            'event, run_at and after are all null.',
            'Give an event, a moment or jobs; release gives a job back that may run again at once.'
        ]
        when octet_length(event) not between 1 and 200 then pgqueue._bad_name('event', event)
        when octet_length(step) not between 1 and 200 then pgqueue._bad_name('the name of a step', step)
        when job_id = any (after) then array[
            'a job cannot wait for itself', format('after has its id, %s.', job_id), 'Name other jobs.'
        ]
        when in_turn is not null then array[
            format('job %s already waits for job %s', in_turn, job_id),
            'If each waited for the other, directly or through others, neither would ever run.',
            'Give an event or a run_at as well, or let only one wait.'
        ]
        else coalesce(
            case when run_at is not null then pgqueue._check_ranges(run_at => run_at) end,
            case when after is not null then pgqueue._check_after(after, null) end
        )
    end;
end;
$$;
