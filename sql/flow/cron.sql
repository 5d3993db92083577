-- Cron: what an expression such as "30 2 * * mon-fri" means, and when it is due next.
--
-- The fields are those of Debian's cron, and a sixth for seconds may follow: minute, hour, day of the month,
-- month, weekday, second. If both days are restricted either is enough; a field that begins with *
-- does not count as restricted, even with a step.
--
-- A slot is a local time. When the clocks go forward, the slots that they skip are due at the moment of the change, as
-- one. When they go back, a slot that occurs twice is due the first time. But if every hour is listed, the hours that
-- really pass count: none is skipped or made up for, and one that occurs twice counts twice.
--
-- It does not go from minute to minute: it looks for the day in the next 41 years (a 29 February that must be a
-- Sunday is that rare), and for the time of day only among those that can be the next.

-- What a field of a cron expression lists: *, numbers or names, ranges, steps, separated by commas; null
-- if it cannot be parsed.
create or replace function pgqueue._cron_values(field text, low int, high int, names text[])
    returns int[]
    language plpgsql
    immutable
as $$
declare
    listed int[] := '{}'::int[];
    part text[];
    first int;
    last int;
begin
    for part in
        select regexp_match(p.part, '^(?:([*])|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,3}))?$')
        from regexp_split_to_table(lower(field collate "C"), ',') as p (part)
    loop
        -- The first name stands for low.
        first := case when part[2] ~ '[0-9]' then part[2]::int else array_position(names, part[2]) + low - 1 end;
        last := case when part[3] ~ '[0-9]' then part[3]::int else array_position(names, part[3]) + low - 1 end;
        if part[1] is not null then
            first := low;
            last := high;
        elsif part[3] is null then
            last := case when part[4] is null then first else high end;
        elsif part[3] = 'sun' and first > 0 then
            last := 7;
        end if;
        if (first between low and last and last <= high and coalesce(part[4]::int, 1) > 0) is not true then
            return null;
        end if;
        listed := listed || array(select generate_series(first, last, coalesce(part[4]::int, 1)));
    end loop;
    return array(select distinct v.value from unnest(listed) as v (value) order by 1);
end;
$$;

-- The fields of a cron expression, or of what @daily and the like stand for.
create or replace function pgqueue._cron_fields(cron text)
    returns text[]
    language sql
    immutable
as $$
    select string_to_array(
        coalesce(
            '{
                "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0",
                "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@hourly": "0 * * * *"
            }'::jsonb ->> lower(btrim(cron, E' \t') collate "C"),
            regexp_replace(btrim(cron, E' \t'), E'[ \t]+', ' ', 'g')
        ),
        ' '
    )
$$;

-- What a cron expression lists, field by field; null if one cannot be parsed.
create or replace function pgqueue._read_cron(cron text)
    returns pgqueue._cron
    language plpgsql
    immutable
as $$
declare
    fields text[] := pgqueue._cron_fields(cron);
begin
    return row(
        pgqueue._cron_values(coalesce(fields[6], '0'), 0, 59, null),
        pgqueue._cron_values(fields[1], 0, 59, null),
        pgqueue._cron_values(fields[2], 0, 23, null),
        pgqueue._cron_values(fields[3], 1, 31, null),
        pgqueue._cron_values(fields[4], 1, 12, '{jan,feb,mar,apr,may,jun,jul,aug,sep,oct,nov,dec}'),
        pgqueue._cron_values(fields[5], 0, 7, '{sun,mon,tue,wed,thu,fri,sat}'),
        fields[3] not like '*%' and fields[5] not like '*%'
    )::pgqueue._cron;
end;
$$;

-- Refuses a cron expression that cannot be parsed, or names only days such as 30 February.
create or replace function pgqueue._check_cron(cron text)
    returns text[]
    language plpgsql
    immutable
as $$
declare
    fields text[] := pgqueue._cron_fields(cron);
    listed pgqueue._cron := pgqueue._read_cron(cron);
    how_many int := coalesce(cardinality(fields), 0);
begin
    if how_many not between 5 and 6 or octet_length(cron) > 1000 then
        return array[
            'cron must have five fields, or six with the seconds',
            case
                when cron is null then 'It is null.'
                when octet_length(cron) > 1000 then format('It has %s bytes of at most 1000.', octet_length(cron))
                else format('"%s" has %s.', cron, how_many)
            end,
            'They are minute, hour, day of the month, month, weekday and second, as in ''30 2 * * mon-fri''; or write @daily.'
        ];
    end if;
    return coalesce((
        select array[
            format('the %s of cron cannot be read', f.name),
            format('"%s" is not made of %s.', f.field, f.range),
            'Write *, or numbers, ranges such as 1-5 and steps such as */10, separated by commas.'
        ]
        from (
            values
                ('minute', fields[1], '0 to 59', listed.minutes),
                ('hour', fields[2], '0 to 23', listed.hours),
                ('day of the month', fields[3], '1 to 31', listed.days),
                ('month', fields[4], '1 to 12 or jan to dec', listed.months),
                ('weekday', fields[5], '0 to 7 or sun to sat', listed.weekdays),
                ('second', fields[6], '0 to 59', listed.seconds)
        ) as f (name, field, range, listed)
        where f.listed is null
        limit 1
    ), case when pgqueue._local_slot_after(listed, '2000-01-01') is null then array[
        'cron names a day that never comes',
        format('"%s" asks for day %s of a month that has fewer.', cron, listed.days[1]),
        'The longest February has 29 days; April, June, September and November have 30.'
    ] end);
end;
$$;

-- Refuses what is not the full name of a time zone: an offset or an abbreviation does not say when the clocks
-- change. null passes. AT TIME ZONE takes the names of four zones for abbreviations.
create or replace function pgqueue._check_timezone(timezone text)
    returns text[]
    language plpgsql
    stable
as $$
declare
    is_abbreviation boolean := timezone in ('CET', 'EET', 'MET', 'WET');
begin
    -- pg_timezone_names comes last: it reads all zones from disk, which takes a tenth of a second.
    return case when timezone <> 'UTC'
        and not exists (select from pgqueue.schedule as s where s.timezone = _check_timezone.timezone)
        and (is_abbreviation or not exists (select from pg_timezone_names as z where z.name = _check_timezone.timezone))
    then array[
        'timezone must be the name of a time zone',
        format(
            case when is_abbreviation then '"%s" is an abbreviation, whose clocks never change.' else '"%s" is not one.' end,
            timezone
        ),
        'Write a name such as Europe/Berlin: select name from pg_timezone_names lists them.'
    ] end;
end;
$$;

-- The first slot of a cron expression after a local time, as local time; null after the year 9998.
create or replace function pgqueue._local_slot_after(cron pgqueue._cron, here timestamp)
    returns timestamp
    language plpgsql
    immutable
as $$
begin
    return (
        select d.day + t.time
        -- Generated one by one, in order, until one is found.
        from (select here::date + generate_series(0, 14975) as day) as d
        cross join lateral (
            select date_part('day', d.day) = any (cron.days),
                -- Sunday is 0 and 7.
                array[date_part('dow', d.day), date_part('isodow', d.day)]::int[] && cron.weekdays
        ) as n (is_day, is_weekday)
        cross join lateral (
            -- The next slot can have another minute than the first only in this hour, another second only in this
            -- minute.
            select min(make_time(h.hour, m.minute, s.second))
            from unnest(cron.hours) as h (hour)
            cross join unnest(
                cron.minutes[: case when h.hour = date_part('hour', here) then 60 else 1 end]
            ) as m (minute)
            cross join unnest(
                cron.seconds[: case when m.minute = date_part('minute', here) then 60 else 1 end]
            ) as s (second)
            where d.day + make_time(h.hour, m.minute, s.second) > here
        ) as t (time)
        where t.time is not null and d.day < '9999-01-01' and date_part('month', d.day) = any (cron.months)
            and (n.is_day and n.is_weekday or cron.is_either and (n.is_day or n.is_weekday))
        limit 1
    );
end;
$$;

-- How far the clocks of a time zone are ahead of UTC at a moment.
create or replace function pgqueue._ahead_of_utc(moment timestamptz, timezone text)
    returns interval
    language sql
    immutable
as $$
    select (moment at time zone timezone) - (moment at time zone 'UTC')
$$;

-- When the clocks of a time zone change between two moments, at most a day apart; null if the offset is the
-- same at both.
create or replace function pgqueue._clock_change(timezone text, low timestamptz, high timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
declare
    before interval := pgqueue._ahead_of_utc(low, timezone);
    middle timestamptz;
begin
    if pgqueue._ahead_of_utc(high, timezone) = before then
        return null;
    end if;
    high := date_trunc('second', high);
    while low + interval '1 second' < high loop
        middle := date_trunc('second', low + (high - low) / 2);
        if pgqueue._ahead_of_utc(middle, timezone) = before then
            low := middle;
        else
            high := middle;
        end if;
    end loop;
    return high;
end;
$$;

-- The first slot of a cron expression after a moment; null after the year 9998.
create or replace function pgqueue._slot_after(cron pgqueue._cron, timezone text, after timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
declare
    is_hourly boolean := cardinality(cron.hours) = 24;
    start timestamptz := after;
    here timestamp := after at time zone timezone;
    local timestamp;
    change timestamptz;
    slot timestamptz;
begin
    if not is_hourly then
        -- Local times that the clocks already showed before they went back do not count again.
        change := pgqueue._clock_change(timezone, after - interval '24 hours', after);
        here := greatest(here, (change - interval '1 microsecond') at time zone timezone);
    end if;
    loop
        local := pgqueue._local_slot_after(cron, here);
        -- Right if the clocks do not change before it.
        slot := (local - pgqueue._ahead_of_utc(start, timezone)) at time zone 'UTC';
        change := pgqueue._clock_change(timezone, start, start + interval '24 hours');
        if slot >= change then
            if is_hourly then
                here := (change at time zone timezone) - interval '1 microsecond';
            elsif local <= change at time zone timezone then
                -- The clocks skip it.
                return change;
            end if;
            start := change;
        elsif slot > start + interval '24 hours' then
            -- Closer to it the offset may be a different one.
            start := (local - interval '24 hours') at time zone timezone;
        else
            exit;
        end if;
    end loop;
    return slot;
end;
$$;

create or replace function pgqueue.next_slots(
    cron text, timezone text default 'UTC', after timestamptz default null, slots int default 1
)
    returns setof timestamptz
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_cron(cron collate "C"), pgqueue._check_timezone(timezone),
        case
            when after not between '1970-01-01' and '9998-12-31' then array[
                'after must be between the years 1970 and 9998', format('It is %s.', after),
                'Omit it for the current time.'
            ]
            when slots not between 1 and 10000 then array[
                'slots must be 1 to 10000', format('It is %s.', slots),
                'Ask again after the last one.'
            ]
        end
    ));
    listed pgqueue._cron := pgqueue._read_cron(cron collate "C");
    slot timestamptz := coalesce(after, clock_timestamp());
begin
    for place in 1 .. coalesce(slots, 1) loop
        slot := pgqueue._slot_after(listed, coalesce(timezone, 'UTC'), slot);
        exit when slot is null;
        return next slot;
    end loop;
end;
$$;

comment on function pgqueue.next_slots(text, text, timestamptz, int) is
'The next slots of a cron expression after a moment (default: now), 1 to 10,000
of them: minute, hour, day of the month, month, weekday and, if there is a
sixth field, second, in a time zone. Numbers, names, *, ranges, steps and
lists; if both days are restricted either is enough; @yearly, @monthly,
@weekly, @daily, @hourly. A local time that the clocks skip is due when they
change, one that occurs twice the first time; if every hour is listed, every
hour that passes counts.
Raises 22023 (bad argument).';
