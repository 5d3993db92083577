-- How a worker ends attempts: complete, fail and release, and finish for many jobs, each with its own
-- outcome. What happens to a job that did not complete is in module attempt.

-- Here and in complete_many the INSERT of _log() is repeated: this is the hottest path of
-- all, and locking the jobs first, as the other functions do, costs half as much again. For one
-- job two plain statements are cheapest, for many jobs one statement with two parts.
create or replace function pgqueue.complete(job_id bigint, token bigint, result jsonb default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    awaited bigint := pg_sequence_last_value('pgqueue.awaited_seq');
    keep_runs int;
    -- Whether keep_runs or keep_payloads is set anywhere; null for no.
    is_configured boolean;
    is_logged boolean;
    done record;
    found_before bigint;
    is_followed boolean;
    options jsonb;
    refused boolean;
begin
    -- Few conditions and variables, because each one on the path of a plain job costs half a percent.
    if current_setting('transaction_isolation') <> 'read committed'
        or pg_relation_size('pgqueue.queue_keep_idx') > 8192
    then
        refused := pgqueue._refuse(pgqueue._check_isolation());
        is_configured := true;
        is_logged := pgqueue._log_kept(array[job_id], array[token], array[result], moment);
    end if;

    delete from pgqueue.job as j
    where j.id = complete.job_id and j.token = complete.token
    returning j.attempt, j.run_at, j.claimed_at, j.queue, j.kind, j.worker, j.group_key, j.permits, (j.terms).batch_id
    into done;
    if not found or is_configured or done.batch_id is not null or done.permits is not null
        or awaited >> (hashtext(done.queue) & 255) % 63 & 1 = 1
    then
        if not found or awaited < 0 and not pgqueue._is_own(done.queue, pgqueue._own_queues('worker')) then
            refused := pgqueue._refuse(pgqueue._lost(job_id, token));
        end if;
        if is_configured then
            keep_runs := case when is_logged then 0
                else (pgqueue._in_force(done.queue, done.kind, done.group_key)).keep_runs
            end;
        end if;
        is_followed := pg_sequence_last_value('pgqueue._cell_awaited') > pgqueue._since_2020(moment);
        if done.batch_id is not null then
            options := jsonb_build_object('batch_id', done.batch_id);
        end if;
        if is_followed is not true and done.batch_id is not null then
            -- Inlined from _is_batch_over.
            found_before := pg_sequence_last_value(('pgqueue._cell_batch_' || done.batch_id % 5)::regclass);
            perform from pgqueue.job as j
            where j.id = found_before and (j.terms).batch_id = done.batch_id and j.xmax in ('0'::xid, j.xmin);
            is_followed := not found;
        end if;
        if is_followed is not true and awaited >> (hashtext(done.queue) & 255) % 63 & 1 = 1 then
            is_followed := pgqueue._is_followed(job_id);
        end if;
        if is_followed then
            perform pgqueue._after_end(array[row(
                job_id, 'completed', done.queue, done.group_key, done.batch_id, done.permits, null, null, null
            )::pgqueue._ended]);
        elsif done.permits is not null then
            -- The only step of _after_end that applies.
            perform pgqueue._return_permits(done.permits, array[job_id], array[done.queue], array[done.group_key]);
        end if;
    end if;
    insert into pgqueue.run (
        slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker, result, options
    )
    select
        (floor(date_part('epoch', moment) / 86400)::int + coalesce(keep_runs, 7)) % 16,
        done.attempt, complete.job_id, moment,
        done.claimed_at - least(done.run_at, done.claimed_at), moment - done.claimed_at,
        done.queue, done.kind, 'completed', done.worker, complete.result, options
    where keep_runs is distinct from 0;
end;
$$;

comment on function pgqueue.complete(bigint, bigint, jsonb) is
'Completes a job. Call it in the transaction of the handler''s own writes, and
they commit together; without the lease both roll back.
Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED.';

create or replace function pgqueue.complete_many(job_ids bigint[], tokens bigint[], results jsonb[] default null)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    -- An index scan locks the jobs in the order of their ids.
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_nestloop = off
    set enable_mergejoin = off
    set enable_hashjoin = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_leases(job_ids, tokens),
        case when cardinality(results) <> cardinality(job_ids) then array[
            'results must be as long as job_ids',
            format('There are %s ids and %s results.', cardinality(job_ids), cardinality(results)),
            'Use null for a job without a result.'
        ] end
    ));
    moment timestamptz := clock_timestamp();
    today int := floor(date_part('epoch', moment) / 86400)::int;
    is_configured boolean;
    is_logged boolean;
    is_awaited boolean := false;
    awaited bigint := pg_sequence_last_value('pgqueue.awaited_seq');
    own text[] := case when awaited < 0 then pgqueue._own_queues('worker') end;
    done_ids bigint[];
    followed pgqueue._ended[];
    is_followed boolean;
begin
    if awaited <> 0 then
        is_awaited := pg_sequence_last_value('pgqueue._cell_awaited') > pgqueue._since_2020(moment);
    end if;
    is_configured := pg_relation_size('pgqueue.queue_keep_idx') > 8192;
    if is_configured then
        is_logged := pgqueue._log_kept(job_ids, tokens, results, moment);
    end if;
    with done as (
        delete from pgqueue.job as j
        where j.id = any (complete_many.job_ids)
            -- "is true" keeps this a filter: the planner might begin with it if it were a join.
            and ((j.id, j.token) in (
                select h.id, h.token
                from unnest(complete_many.job_ids, complete_many.tokens) as h (id, token)
            )) is true
            and pgqueue._is_own(j.queue, own)
        returning
            j.id, j.token, j.attempt, j.run_at, j.claimed_at, j.queue, j.kind, j.worker, j.group_key, j.permits,
            (j.terms).batch_id,
            case
                when is_logged then 0
                when is_configured then (pgqueue._in_force(j.queue, j.kind, j.group_key)).keep_runs
                else 7
            end as keep_runs,
            -- Null if nothing follows the end, false if only a permit is returned.
            case
                when is_awaited or (j.terms).batch_id is not null or cardinality(j.permits) > 1
                    -- A job that is just beginning to wait for this one leaves a loose end.
                    or awaited >> (hashtext(j.queue) & 255) % 63 & 1 = 1 and pgqueue._is_followed(j.id)
                    then true
                when j.permits is not null then false
            end as is_followed
    ), logged as (
        insert into pgqueue.run (
            slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker, result, options
        )
        select
            (today + d.keep_runs) % 16, d.attempt, d.id, moment,
            d.claimed_at - least(d.run_at, d.claimed_at), moment - d.claimed_at,
            d.queue, d.kind, 'completed', d.worker,
            given.result, case when d.batch_id is not null then jsonb_build_object('batch_id', d.batch_id) end
        from done as d
        left join (
            select distinct on (h.id, h.token) h.*
            from unnest(
                case when complete_many.results is not null then complete_many.job_ids end,
                case when complete_many.results is not null then complete_many.tokens end,
                complete_many.results
            ) as h (id, token, result)
        ) as given on given.id = d.id and given.token = d.token
        where d.keep_runs > 0
    )
    select
        array_agg(d.id),
        array_agg(row(
            d.id, 'completed', d.queue, d.group_key, d.batch_id, d.permits, null, null, null
        )::pgqueue._ended) filter (where d.is_followed is not null),
        bool_or(d.is_followed)
    into done_ids, followed, is_followed
    from done as d;
    if is_followed then
        perform pgqueue._after_end(followed);
    elsif followed is not null then
        -- The only step of _after_end that applies.
        perform pgqueue._return_permits(array_agg(e.permits[1]), done_ids, array_agg(e.queue), array_agg(e.group_key))
        from unnest(followed) as e;
    end if;
    return query select unnest(done_ids);
end;
$$;

comment on function pgqueue.complete_many(bigint[], bigint[], jsonb[]) is
'Completes many jobs, with their results if there are any, and returns the ids
of those whose lease was held; the others were lost, and stay as they are.
Raises 25001 outside READ COMMITTED, 22023 (arrays of unequal length).';

create or replace function pgqueue.fail(
    job_id bigint,
    token bigint,
    error text,
    retry_in interval default null,
    permanent boolean default false
)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_isolation(), pgqueue._check_delay('retry_in', retry_in)
    ));
    moment timestamptz := clock_timestamp();
    picks tid[] := pgqueue._lock_held(array[job_id], array[token]);
begin
    if picks = '{}' then
        refused := pgqueue._refuse(pgqueue._lost(job_id, token));
    end if;
    return (
        select e.status
        from pgqueue._end_attempts(
            picks, array[case when permanent then 'reject' else 'fail' end], array[error],
            array[moment + retry_in], moment
        ) as e
    );
end;
$$;

comment on function pgqueue.fail(bigint, bigint, text, interval, boolean) is
'Ends an attempt that went wrong. Returns retry (the job runs again after
retry_in, or after the queue''s backoff: least(retry_cap, retry_base *
2^(attempt - 1)) times a random 0.5 to 1), dead (attempts used up, or
permanent) or cancelled (an operator cancelled it). Keeps the first 8000
characters of the error; its first line is its summary ("TimeoutError: ..."),
used to find and log it.
Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED, 22023 (bad
argument).';

create or replace function pgqueue.release(job_ids bigint[], tokens bigint[], run_at timestamptz default null)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_leases(job_ids, tokens),
        case when run_at is not null then pgqueue._check_ranges(run_at => run_at) end
    ));
    picks tid[];
begin
    picks := pgqueue._lock_held(job_ids, tokens);
    return query
    select e.job_id
    from pgqueue._end_attempts(
        picks, array_fill('release'::text, array[cardinality(picks)]), null,
        array_fill(release.run_at, array[cardinality(picks)]), clock_timestamp()
    ) as e;
end;
$$;

comment on function pgqueue.release(bigint[], bigint[], timestamptz) is
'Gives jobs back: the attempt is not counted, and each keeps its place in its
lane, or runs again at run_at (a snooze). A cancelled job is deleted. Returns
the ids whose lease was held.
Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

-- Parses results from JSON; problems says what is wrong with those that Postgres cannot store.
create or replace function pgqueue._to_results(texts text[], out results jsonb[], out problems text[])
    language plpgsql
as $$
begin
    -- Much more than this does not fit into one jsonb, nor several of that size into one array.
    problems := array(
        select case when octet_length(t.result) > 64000000
            then format('the result has %s bytes of at most 64000000', octet_length(t.result))
        end
        from unnest(texts) with ordinality as t (result, place)
        order by t.place
    );
    begin
        results := array(
            select case when t.problem is null then t.result::jsonb end
            from unnest(texts, problems) with ordinality as t (result, problem, place)
            order by t.place
        );
    exception when data_exception or feature_not_supported or program_limit_exceeded then
        -- One by one, so that a bad one does not affect the others.
        results := array_fill(null::jsonb, array[cardinality(texts)]);
        for place in 1 .. cardinality(texts) loop
            begin
                if problems[place] is null then
                    results[place] := texts[place]::jsonb;
                end if;
            exception when data_exception or feature_not_supported or program_limit_exceeded then
                problems[place] := 'the result cannot be stored: ' || sqlerrm;
            end;
        end loop;
    end;
end;
$$;

-- finish for those jobs whose lease is held; the rows come in any order.
create or replace function pgqueue._finish_each(
    job_ids bigint[], tokens bigint[], outcomes text[], texts text[], delays interval[]
)
    returns table (job_id bigint, token bigint, status text)
    language plpgsql
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    moment timestamptz := clock_timestamp();
    picks tid[] := pgqueue._lock_held(job_ids, tokens);
    results jsonb[];
    problems text[];
    asked record;
    said pgqueue._suspension;
    terms pgqueue._suspension[];
    given record;
begin
    select r.results, r.problems into results, problems
    from pgqueue._to_results(array(
        select case when e.outcome = 'complete' then e.said end
        from unnest(outcomes, texts) with ordinality as e (outcome, said, place)
        order by e.place
    )) as r;
    if 'suspend' = any (outcomes) then
        terms := array_fill(null::pgqueue._suspension, array[cardinality(outcomes)]);
        -- Not by their subscripts, which may begin anywhere.
        for asked in
            select u.*
            from unnest(job_ids, outcomes, texts, delays) with ordinality as u (id, outcome, terms, delay, place)
            where u.outcome = 'suspend'
        loop
            begin
                said := jsonb_populate_record(
                    row(null, moment + asked.delay, null, null)::pgqueue._suspension, asked.terms::jsonb
                );
                terms[asked.place] := said;
                problems[asked.place] := coalesce(
                    (pgqueue._check_suspension(asked.id, said.event, said.run_at, said.after, said.step))[1],
                    -- Without this, one whose time limit has the wrong name waits for ever.
                    case when asked.terms::jsonb - '{event,run_at,after,step}'::text[] <> '{}'
                        then 'the terms of a suspension are event, run_at, after and step'
                    end
                );
            exception when data_exception or feature_not_supported or program_limit_exceeded then
                problems[asked.place] := 'it cannot be suspended on these terms: ' || sqlerrm;
            end;
        end loop;
    end if;

    for given in
        select
            case when e.outcome in ('complete', 'suspend') then e.outcome end as verb,
            array_agg(h.id) as ids,
            array_agg(e.token) as tokens,
            array_agg(h.place) as picks,
            array_agg(e.outcome) as outcomes,
            array_agg(e.said) as texts,
            array_agg(moment + e.delay) as run_ats,
            array_agg(e.result) as results,
            array_agg(row(e.event, e.run_at, e.after, e.step)::pgqueue._suspension) as terms
        from (
            select distinct on (u.id, u.token)
                u.id, u.token, u.delay, u.result, coalesce(u.problem, u.said) as said, u.event, u.run_at, u.after, u.step,
                case when u.problem is null then u.outcome else 'fail' end as outcome
            from unnest(job_ids, tokens, outcomes, texts, delays, results, problems, terms) with ordinality
                as u (id, token, outcome, said, delay, result, problem, event, run_at, after, step, place)
            order by u.id, u.token, u.place
        ) as e
        join (
            select j.id, j.token, p.place
            from unnest(picks) as p (place)
            cross join lateral (select j.id, j.token from pgqueue.job as j where j.ctid = p.place offset 0) as j
        ) as h on h.id = e.id and h.token = e.token
        group by 1
    loop
        if given.verb = 'complete' then
            return query
            select c.id, given.tokens[array_position(given.ids, c.id)], 'completed'
            from pgqueue.complete_many(given.ids, given.tokens, given.results) as c (id);
        elsif given.verb = 'suspend' then
            return query
            select s.id, s.token, pgqueue._suspend(s.id, s.token, s.event, s.run_at, s.after, s.step, moment)
            from unnest(given.ids, given.tokens, given.terms) as s (id, token, event, run_at, after, step);
        else
            return query
            select e.job_id, given.tokens[array_position(given.ids, e.job_id)], e.status
            from pgqueue._end_attempts(given.picks, given.outcomes, given.texts, given.run_ats, moment) as e;
        end if;
    end loop;
end;
$$;

create or replace function pgqueue.finish(
    job_ids bigint[],
    tokens bigint[],
    outcomes text[],
    texts text[] default null,
    delays interval[] default null
)
    returns table (job_id bigint, status text)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_leases(finish.job_ids, tokens),
        pgqueue._check_outcomes(finish.job_ids, outcomes, texts, delays)
    ));
    ended bigint[];
    held bigint[];
    statuses text[];
begin
    if 'complete' = all (outcomes) and coalesce(num_nonnulls(variadic texts), 0) = 0
        -- If a job is given under two tokens one is lost, and complete_many does not say which.
        and cardinality(finish.job_ids) = (select count(distinct u.id) from unnest(finish.job_ids) as u (id))
    then
        ended := array(select pgqueue.complete_many(finish.job_ids, finish.tokens));
        statuses := array_fill('completed'::text, array[cardinality(ended)]);
    else
        select array_agg(f.job_id), array_agg(f.token), array_agg(f.status) into ended, held, statuses
        from pgqueue._finish_each(finish.job_ids, finish.tokens, outcomes, texts, delays) as f;
    end if;
    return query
    select g.id, case when g.nth = 1 then coalesce(e.status, 'lost') else 'lost' end
    from (
        select u.id, u.token, u.place, row_number() over (partition by u.id, u.token order by u.place) as nth
        from unnest(finish.job_ids, finish.tokens) with ordinality as u (id, token, place)
    ) as g
    left join unnest(ended, held, statuses) as e (id, token, status) on e.id = g.id and coalesce(e.token, g.token) = g.token
    order by g.place;
end;
$$;

comment on function pgqueue.finish(bigint[], bigint[], text[], text[], interval[]) is
'Ends many attempts in one call, each by its own outcome: complete (text: the
result in JSON), fail (text: the error; delay: instead of the queue''s
backoff), reject (a permanent error: dead at once), release (given back
uncounted; text: the reason, for why(); delay: not before then) or suspend
(text: {"event", "run_at", "after", "step"} in JSON, each optional; delay: its
run_at). Returns in the order of the input completed, retry, dead, cancelled,
released, suspended or lost. A result that is not JSON, or above 64 MB, or terms
that suspend would refuse, fail the attempt of that job alone.
Raises 25001 outside READ COMMITTED, 22023 (bad argument).';
