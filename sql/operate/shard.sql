-- Ids and tokens that are never given out twice: neither by two databases, nor again by the standby of one. Shards are
-- several databases, each an ordinary pgqueue. The table shard says which one this is, and its trigger sets the
-- increment of the sequences. A standby that is promoted may not have received the last numbers, so it skips some.

-- Sets the increment of both sequences to the number of shards, and their next value to the next number that
-- belongs to this shard. The ALTER waits for transactions that have taken numbers.
create or replace function pgqueue._step_sequences()
    returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    sequence text;
    last bigint;
    first bigint;
begin
    foreach sequence in array array['pgqueue.job_id_seq', 'pgqueue.token_seq'] loop
        execute format('alter sequence %s increment by %s', sequence, new.of);
        last := coalesce(pg_sequence_last_value(sequence::regclass), 0);
        if (last - new.number) % new.of <> 0 then
            new.above := greatest(new.above, last);
        end if;
        if last <= new.above then
            first := new.above + 1 + ((new.number - new.above - 1) % new.of + new.of) % new.of;
            -- As if the one before had been given out, or all that was would look unused until the first is.
            perform setval(sequence, case when first > new.of then first - new.of else first end, first > new.of);
        end if;
    end loop;
    return new;
end;
$$;

-- "enable always", so that it also fires for rows of a subscription.
create or replace trigger shard_steps_sequences before insert or update on pgqueue.shard
for each row execute function pgqueue._step_sequences();
alter table pgqueue.shard enable always trigger shard_steps_sequences;

create or replace function pgqueue.shard(number int, of int default 1024, above bigint default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean := pgqueue._refuse(case
        when (of between 1 and 65536 and number between 1 and of) is not true then array[
            'number must be between 1 and of, and of at most 65536',
            format('They are %s and %s.', coalesce(number::text, 'null'), coalesce(of::text, 'null')),
            'Number the shards from 1 on. of is how many there can ever be, and the same for all.'
        ]
        when above not between 0 and 4611686018427387904 then array[
            'above must be between 0 and 2^62', format('It is %s.', above), 'Omit it for a new database.'
        ]
    end);
    last bigint := greatest(pg_sequence_last_value('pgqueue.job_id_seq'), pg_sequence_last_value('pgqueue.token_seq'));
    present record;
    is_used boolean;
begin
    select s.* into present from pgqueue.shard as s;
    if (present.number, present.of, coalesce(above, present.above)) = (number, of, present.above) then
        return;
    end if;
    delete from pgqueue.shard as s where s.number = present.number;
    -- The trigger waits for sessions that are enqueuing or claiming, and puts the numbers that they took into above.
    insert into pgqueue.shard as s (number, of, above)
    values (shard.number, shard.of, coalesce(shard.above, 0))
    returning case when s.above > coalesce(shard.above, 0) then greatest(s.above, last) else last end into last;
    is_used := last > coalesce(present.above, 0)
        or exists (select from pgqueue.job) or exists (select from pgqueue.dead_job)
        or exists (select from pgqueue.batch) or exists (select from pgqueue.run)
        or exists (select from pgqueue.gone);
    refused := pgqueue._refuse(case
        when last > 0 and is_used and present.number is not null then array[
            format('this is shard %s of %s', present.number, present.of),
            format('Its ids and tokens are in use, up to %s.', last), 'A shard keeps its number for ever.', '55000'
        ]
        when above is null and is_used then array[
            'only an empty install can become a shard',
            concat_ws(' ', 'It has jobs, or had some.', format('Ids and tokens up to %s are in use.', last)),
            'Call shard right after create extension. To make a database with jobs the first of several, pass above.',
            '55000'
        ]
        when last > above then array[
            format('above must be at least %s', last), format('It is %s, and ids and tokens up to that are in use.', above),
            'Choose a number well ahead of that, and pass the same to all shards.'
        ]
    end);
end;
$$;

comment on function pgqueue.shard(int, int, bigint) is
'Makes this database one of several whose ids and tokens are never the same:
they begin at number and step by of, which is how many there can ever be. Only
on an empty install, before the first job; pg_dump and restore keep it.
above: to add shards to a database that has jobs, the same for all: numbers up
to this belong to that database, and all shards begin after it.
Raises 22023 (bad argument), 55000 (ids have been given out).';

create or replace function pgqueue.shard_of(key text, shards int)
    returns int
    language plpgsql
    immutable
    parallel safe
    set search_path = pg_catalog, pg_temp
as $$
begin
    if key is null or shards < 1 is not false then
        raise exception using
            errcode = '22023',
            message = 'key must not be null, and shards must be at least 1',
            detail = format('They are %s and %s.', coalesce(quote_literal(key), 'null'), coalesce(shards::text, 'null')),
            hint = 'What has no key may go to any shard.';
    end if;
    -- Not hashtext, which differs between versions and with the byte order of the machine.
    return ('x' || left(encode(sha256(convert_to(key, 'UTF8')), 'hex'), 8))::bit(32)::bigint % shards;
end;
$$;

comment on function pgqueue.shard_of(text, int) is
'To which of so many shards a key belongs, as a place in a list, from 0 on: the
first four bytes of the SHA-256 of the key in UTF-8, read as an unsigned
big-endian number, modulo shards. With twice as many shards a key stays, or
moves to its old place plus the old number of shards.
Raises 22023 (bad argument).';

-- The timeline of the server: each promotion begins a new one. Not from the control file, which may not have it
-- until after the first claim. 1 where a provider does not let us see the WAL.
create or replace function pgqueue._timeline()
    returns bigint
    language plpgsql
as $$
begin
    return ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint;
exception when feature_not_supported or insufficient_privilege then
    return 1;
end;
$$;

create or replace function pgqueue.after_failover(always boolean default false)
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    timeline bigint;
    skipped bigint;
    refused boolean := pgqueue._refuse(
        -- Enough such calls would use up all numbers.
        case when always and not has_function_privilege(pgqueue._caller(), 'pgqueue.shard(int, int, bigint)', 'execute')
            then array[
                'always is for operators', format('Role %I is not an operator.', pgqueue._caller()),
                'Without always, the call skips numbers where that is needed.', '42501'
            ]
        end
    );
begin
    -- A standby gives out no numbers.
    if pg_is_in_recovery() then
        return false;
    end if;
    timeline := pgqueue._timeline();
    if always is not true and timeline = pg_sequence_last_value('pgqueue._cell_timeline'::regclass) then
        return false;
    end if;
    -- One session at a time: a second one would set the sequences back to numbers that others have already taken.
    lock table pgqueue.shard in share row exclusive mode;
    if always is not true and timeline = pg_sequence_last_value('pgqueue._cell_timeline'::regclass) then
        return false;
    end if;
    -- More after each promotion: this server may know nothing of those that the last primary has skipped.
    skipped := 1000000 * greatest(timeline - pg_sequence_last_value('pgqueue._cell_timeline'::regclass), 1)
        * coalesce((select s.of from pgqueue.shard as s), 1);
    perform setval('pgqueue.job_id_seq', nextval('pgqueue.job_id_seq') + skipped),
        setval('pgqueue.token_seq', nextval('pgqueue.token_seq') + skipped);
    -- Last, so that an interrupted call is repeated. A rollback undoes none of this.
    perform setval('pgqueue._cell_timeline', timeline);
    return true;
end;
$$;

comment on function pgqueue.after_failover(boolean) is
'Skips a million ids and tokens for each time that a standby was promoted, or a
base backup recovered, since the last call: those that the old primary may have
given out without its standby knowing. Call it in each session before its first
claim, as the worker does, and in a producer before its first enqueue if ids are
known outside. always: skips in any case, as after a restore of a dump; for
operators.
Returns whether it has skipped any.
Raises 42501 (always, and the caller is no operator).';

-- A new install has missed no numbers; an upgrade leaves this as it is.
do $$
begin
    if pg_sequence_last_value('pgqueue._cell_timeline'::regclass) is null then
        perform setval('pgqueue._cell_timeline', pgqueue._timeline());
    end if;
end;
$$;
