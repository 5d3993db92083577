-- Handlers in SQL: functions set by configure, and work, which claims jobs and calls them. With it pg_cron, or a
-- loop in psql, is a whole worker.
--
-- work commits, so it can neither be security definer nor pin a search path. It runs with the rights and the path
-- of its caller, as handlers are meant to, and may call only what that role may: it reads the tables through two
-- private functions that are granted to workers. Every name, type and operator in it is qualified; otherwise a
-- stranger's operator in the caller's path would run with the caller's rights.
--
-- The claim commits before the handler begins, so that an attempt that crashes the server counts, and others see
-- which worker has the job. Then the handler's transaction locks the job's row: strongly enough that nobody
-- recovers the job, weakly enough that an operator can cancel it. This lock is the heartbeat, however long the
-- handler takes. A backend that dies loses the lock, and then the lease expires. The handler's writes and the
-- completion of its job are one transaction: once, or never.

-- What is wrong with a call of work, if anything; and which kinds of a queue have handlers (null: all).
create or replace function pgqueue._handled(queue text, run_for interval, out problem text[], out kinds text[])
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
declare
    time_limit interval := current_setting('statement_timeout')::interval;
begin
    kinds := array(
        select distinct q.kind
        from pgqueue.queue as q
        where q.group_key = '' and q.name in ('', _handled.queue) and q.handler is not null
    );
    problem := coalesce(
        -- It cannot be given a transaction that has another.
        case when current_setting('transaction_isolation') <> 'read committed' then array[
            'work needs the isolation level READ COMMITTED',
            format('That of its transactions is %s by default.', upper(current_setting('transaction_isolation'))),
            'First set default_transaction_isolation = ''read committed''; for pg_cron, by ALTER ROLE.',
            '25001'
        ] end,
        pgqueue._check_claim(queue, 'work', 1, null),
        case when run_for <= '0' or run_for > '366 days' then array[
            'run_for must be more than 0 and at most 366 days', format('It is %s.', run_for),
            'Omit it to work until nothing is due.'
        ] end,
        case when run_for >= time_limit and time_limit > '0' then array[
            'run_for must be less than statement_timeout',
            format('It is %s, and statement_timeout, which counts from the call of work, is %s.', run_for, time_limit),
            'The difference is the time that the last handler has.'
        ] end,
        pgqueue._check_access('worker', array[queue]),
        case when kinds = '{}' then array[
            format('queue "%s" has no handler', queue), 'work calls the functions that configure has set.',
            format('select pgqueue.configure(%L, handler => ''public.send(jsonb)'').', queue)
        ] end
    );
    if problem is not null or '' = any (kinds) then
        kinds := null;
    end if;
end;
$$;

-- Keeps other sessions from recovering a job until the transaction ends. Says whether the job is leased under this
-- token and not cancelled, what its handler is, and how to call that with a pgqueue.job (null: no such function).
create or replace function pgqueue._hold(
    job_id bigint, token bigint, out is_held boolean, out handler text, out call text
)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    own text[] := pgqueue._own_queues('worker');
    job record;
begin
    select j.queue, j.kind, j.cancelled_at into job
    from pgqueue.job as j
    where j.id = _hold.job_id and j.token = _hold.token and pgqueue._is_own(j.queue, own)
    for key share;
    is_held := found and job.cancelled_at is null;
    if is_held then
        handler := pgqueue._seldom(job.queue, 'handler', job.kind);
        call := (
            select format(
                'select %s from %I.%I(%s)',
                case when p.prorettype = 'void'::regtype then 'null::pg_catalog.jsonb' else '*' end,
                n.nspname, p.proname,
                case when p.proargtypes[0] = 'jsonb'::regtype then '($1).payload' else '$1' end
            )
            from pg_proc as p
            join pg_namespace as n on n.oid = p.pronamespace
            where p.oid = to_regprocedure(handler)
        );
    end if;
end;
$$;

create or replace procedure pgqueue.work(queue text, run_for interval default null)
    language plpgsql
as $$
declare
    worker pg_catalog.text := pg_catalog.concat(
        pg_catalog.current_setting('application_name'), ':', pg_catalog.pg_backend_pid()
    );
    time_limit interval := pg_catalog.current_setting('statement_timeout')::interval;
    ends_at timestamp with time zone;
    maintains_at timestamp with time zone := pg_catalog.clock_timestamp();
    pause interval;
    look record;
    job pgqueue.job;
    held record;
    result pg_catalog.jsonb;
    became pg_catalog.text;
    state pg_catalog.text;
    error pg_catalog.text;
    detail pg_catalog.text;
    hint pg_catalog.text;
    context pg_catalog.text;
begin
    -- The simple protocol, in a transaction that an earlier message began. In all other cases COMMIT raises an error.
    if pg_catalog.statement_timestamp() operator(pg_catalog.>) pg_catalog.now() and not exists (
        select from pg_catalog.pg_cursors as c where c.name operator(pg_catalog.=) ''
    ) then
        raise exception using
            errcode = '25001',
            message = 'work cannot run inside a transaction block',
            detail = 'It commits after each job.',
            hint = 'Call it as a statement of its own, with autocommit.';
    end if;
    perform pgqueue.after_failover();
    loop
        look := pgqueue._handled(queue, run_for);
        if look.problem is not null then
            raise exception using
                errcode = coalesce(look.problem[4], '22023'), message = look.problem[1],
                detail = look.problem[2], hint = look.problem[3];
        end if;
        commit;
        ends_at := coalesce(ends_at, pg_catalog.clock_timestamp() operator(pg_catalog.+) run_for);
        exit when pg_catalog.clock_timestamp() operator(pg_catalog.>=) ends_at;
        if run_for is not null and pg_catalog.clock_timestamp() operator(pg_catalog.>=) maintains_at then
            perform from pgqueue.maintain();
            commit;
            maintains_at := pg_catalog.clock_timestamp() operator(pg_catalog.+) interval '1 minute';
        end if;

        select c.* into job from pgqueue.claim(queue, worker, kinds => look.kinds) as c;
        commit;
        if job.id is null then
            exit when run_for is null;
            pause := pgqueue.rest(array[queue], look.kinds, park => false);
            commit;
            perform pg_catalog.pg_sleep_for(greatest(interval '10 milliseconds', least(
                pause, interval '1 second', ends_at operator(pg_catalog.-) pg_catalog.clock_timestamp()
            )));
            commit;
            continue;
        end if;

        held := pgqueue._hold(job.id, job.token);
        if not held.is_held then
            perform pgqueue.release(array[job.id], array[job.token]);
            commit;
            continue;
        end if;
        state := null;
        begin
            if held.call is null then
                raise exception using
                    message = pg_catalog.concat('handler ', held.handler, ' does not exist'),
                    hint = 'Create it, or configure another.';
            end if;
            execute held.call into result using job;
            -- Check deferred constraints now: at COMMIT it would be too late to fail this job for them.
            set constraints all immediate;
            -- If the handler has ended the attempt in its own way, this finds nothing to complete.
            perform pgqueue.complete_many(array[job.id], array[job.token], array[result]);
        exception
            -- The only place that catches everything: whatever a handler raises fails its job. "others" does
            -- not include the other two.
            when others or query_canceled or assert_failure then
                get stacked diagnostics
                    state = returned_sqlstate, error = message_text, detail = pg_exception_detail,
                    hint = pg_exception_hint, context = pg_exception_context;
        end;
        -- A timeout and an operator's pg_cancel_backend raise the same error; the time tells them apart. (The
        -- timer started a little before the statement's time.)
        if state operator(pg_catalog.=) '57014' and (
            time_limit operator(pg_catalog.=) interval '0'
            or (pg_catalog.clock_timestamp() operator(pg_catalog.-) pg_catalog.statement_timestamp())
                operator(pg_catalog.<) (time_limit operator(pg_catalog.-) interval '0.1 s')
        ) then
            perform pgqueue.release(array[job.id], array[job.token]);
            became := 'It is given back.';
            hint := 'Call work again to go on.';
        elsif state is not null then
            became := pg_catalog.concat('Its attempt has failed: ', pgqueue.fail(job.id, job.token, pg_catalog.concat_ws(
                E'\n', error, pg_catalog.concat('SQLSTATE: ', state),
                case when detail operator(pg_catalog.<>) '' then pg_catalog.concat('DETAIL: ', detail) end,
                case when hint operator(pg_catalog.<>) '' then pg_catalog.concat('HINT: ', hint) end,
                case when context operator(pg_catalog.<>) '' then pg_catalog.concat('CONTEXT: ', context) end
            )), '.');
            hint := 'Let run_for be shorter than statement_timeout, by the time that one job may take.';
        end if;
        commit;
        if state operator(pg_catalog.=) '57014' then
            raise exception using
                errcode = state, message = error, detail = pg_catalog.concat('Job ', job.id, ' was running. ', became),
                hint = hint;
        end if;
    end loop;
end;
$$;

comment on procedure pgqueue.work(text, interval) is
'A worker: claims the jobs of a queue one by one, and calls the functions that
configure has set as their handlers. What a handler returns is the result of its
job, which completes in the transaction of the handler''s writes; if it raises,
these are rolled back and the attempt fails with the message, detail, hint and
context. If it has itself called complete, fail, release or suspend for its job,
that stands. With run_for, works and waits for jobs that long, and calls
maintain once a minute; without it, works until nothing is due. Commits: call it
as a statement of its own. Handlers run with the rights and settings of the
caller. A statement_timeout fails the current attempt, pg_cancel_backend gives
the job back; both end the call.
Raises 25001 in a transaction block (where that cannot be seen, Postgres raises
2D000) and outside READ COMMITTED, 25006 (read-only), 22023 (bad argument, or
no handler), 42501 (the caller is a worker of other queues only), 57014.';
