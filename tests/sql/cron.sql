-- Cron expressions: what is refused, and the rules at clock changes. test_cron.py compares ten years of slots.
begin;
set local client_min_messages = warning;
set local timezone = 'UTC';
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(34);

create function pg_temp.slots(
    cron text, timezone text, after timestamptz, slots int default 1, form text default 'YYYY-MM-DD HH24:MI'
)
    returns text
    language sql
as $$
    select string_agg(to_char(s.slot, form), ', ' order by s.slot)
    from pgqueue.next_slots(cron, timezone, after, slots) as s (slot)
$$;

select is(
    pg_temp.slots('5 4 * * *', 'UTC', '2024-01-01 04:05'), '2024-01-02 04:05', 'a slot is after the moment, not at it'
);
select is(
    pg_temp.slots('5 4 * * *', 'UTC', '2024-01-01 04:04:59.999999'), '2024-01-01 04:05',
    'a slot is the first after a fraction of a second'
);
select is(
    pg_temp.slots('0 0 * * * */25', 'UTC', '2024-01-01', 3, 'HH24:MI:SS'), '00:00:25, 00:00:50, 00:00:00',
    'a sixth field is for seconds'
);
select is(
    pg_temp.slots(' 0  12' || E'\t* JAN,mar-Apr Fri-Sun ', 'UTC', '2024-01-26 12:00', 4, 'Mon DD Dy'),
    'Jan 27 Sat, Jan 28 Sun, Mar 01 Fri, Mar 02 Sat', 'names are read in any case, ranges may end with Sunday, blanks do not matter'
);
select is(
    pg_temp.slots('0 0 * * 0', 'UTC', '2024-01-01'), pg_temp.slots('0 0 * * 7', 'UTC', '2024-01-01'),
    'Sunday is 0 and 7'
);
select is(
    pg_temp.slots('0 0 * * sun-sun', 'UTC', '2024-01-01', 2, 'DD Dy'), '07 Sun, 14 Sun', 'a range that is Sunday alone is no week'
);
select is(
    pg_temp.slots('0 0 13 * fri', 'UTC', '2024-09-01', 3, 'DD Dy'), '06 Fri, 13 Fri, 20 Fri',
    'where both days are restricted either is enough'
);
select is(
    pg_temp.slots('0 0 */2 * mon', 'UTC', '2024-09-01', 3, 'DD Dy'), '09 Mon, 23 Mon, 07 Mon',
    'a day that begins with * does not make either enough'
);
select is(
    pg_temp.slots('50/5 * * * *', 'UTC', '2024-01-01 00:51', 2), '2024-01-01 00:55, 2024-01-01 01:50',
    'a step after one number goes on to the end'
);
select is(pg_temp.slots('0 0 29 2 *', 'UTC', '2096-03-01'), '2104-02-29 00:00', '29 February is found over eight years');
select is(
    pg_temp.slots('0 0 29 2 */7', 'UTC', '2088-03-01'), '2128-02-29 00:00', 'so is one that must be a Sunday, over forty'
);
select is(
    pg_temp.slots('0 0 1 1 *', 'UTC', '9997-06-01', 3), '9998-01-01 00:00', 'there are no slots after the year 9998'
);
select is(
    (
        select array_agg(pg_temp.slots(n.name, 'UTC', '2024-01-31 12:34'))
        from unnest('{@hourly,@daily,@midnight,@weekly,@monthly,@yearly,@annually}'::text[]) as n (name)
    ),
    array[
        '2024-01-31 13:00', '2024-02-01 00:00', '2024-02-01 00:00', '2024-02-04 00:00', '2024-02-01 00:00',
        '2025-01-01 00:00', '2025-01-01 00:00'
    ],
    '@hourly and the like are what they say'
);

-- Clock changes

select is(
    pg_temp.slots('30 2 * * *', 'Europe/Berlin', '2024-03-30', 3),
    '2024-03-30 01:30, 2024-03-31 01:00, 2024-04-01 00:30', 'a slot that the clocks leave out is due when they change'
);
select is(
    pg_temp.slots('*/10 2-3 * * *', 'Europe/Berlin', '2024-03-31', 2), '2024-03-31 01:00, 2024-03-31 01:10',
    'all slots that they leave out are one'
);
select is(
    pg_temp.slots('30 2 * * *', 'Europe/Berlin', '2024-10-26 12:00', 2), '2024-10-27 00:30, 2024-10-28 01:30',
    'a slot that comes twice is due the first time'
);
select is(
    pg_temp.slots('*/30 * * * *', 'Europe/Berlin', '2024-10-26 23:59', 4, 'HH24:MI'), '00:00, 00:30, 01:00, 01:30',
    'where every hour is listed none is left out'
);
select is(
    pg_temp.slots('30 * * * *', 'Europe/Berlin', '2024-03-31 00:00', 2, 'HH24:MI'), '00:30, 01:30',
    'nor made up for'
);
select is(
    pg_temp.slots('15 * * * sun', 'Pacific/Kwajalein', '1993-08-20 12:00', 2), '1993-08-21 12:15, 1993-08-21 13:15',
    'also where the clocks leave out a whole Saturday'
);
set local timezone = 'America/New_York';
select is(
    (select array_agg(extract(epoch from s)) from pgqueue.next_slots('0 3 * * *', 'Asia/Tokyo', '2024-03-09 00:00+0', 3) as s),
    (select array_agg(extract(epoch from s)) from unnest('{2024-03-09 18:00+0,2024-03-10 18:00+0,2024-03-11 18:00+0}'::timestamptz[]) as s),
    'the time zone of the session, and its clock change, do not matter'
);
set local timezone = 'UTC';

-- What is refused

create function pg_temp.refusal(cron text, timezone text default 'UTC')
    returns text
    language plpgsql
as $$
begin
    perform pgqueue.next_slots(cron, timezone);
    return 'not refused';
exception when invalid_parameter_value then
    return sqlerrm;
end;
$$;

select is(
    (
        select string_agg(c.cron, ' | ')
        from unnest(array[
            '60 * * * *', '-1 * * * *', '1- * * * *', '5-1 * * * *', '*/0 * * * *', '1,,2 * * * *', '1,2, * * * *', '** * * * *',
            'jan * * * *', '0.5 * * * *', '00000000001 * * * *', '*/1000 * * * *', E'1\n2 * * * *'
        ]) as c (cron)
        where pg_temp.refusal(c.cron) <> 'the minute of cron cannot be read'
    ),
    null, 'an invalid minute is refused'
);
select is(pg_temp.refusal('* 24 * * *'), 'the hour of cron cannot be read', 'so is an hour');
select is(pg_temp.refusal('* * 0 * *'), 'the day of the month of cron cannot be read', 'so is a day');
select is(pg_temp.refusal('* * * 13 *'), 'the month of cron cannot be read', 'so is a month');
select is(pg_temp.refusal('* * * * sat-mon'), 'the weekday of cron cannot be read', 'so is a range that ends before it begins');
select is(pg_temp.refusal('* * * * * 60'), 'the second of cron cannot be read', 'so is a second');
select is(
    (
        select string_agg(coalesce(c.cron, 'null'), ' | ')
        from unnest(array[null, '', '* * * *', '* * * * * * *', '@reboot', repeat('1,', 600) || '1 * * * *']) as c (cron)
        where pg_temp.refusal(c.cron) <> 'cron must have five fields, or six with the seconds'
    ),
    null, 'a text without five or six fields is refused'
);
select is(
    (
        select string_agg(c.cron, ' | ')
        from unnest(array['0 0 30 2 *', '0 0 31 4,6,9,11 *', '0 0 30-31 feb */2']) as c (cron)
        where pg_temp.refusal(c.cron) <> 'cron names a day that never comes'
    ),
    null, 'a day that never comes is refused'
);
select is(pg_temp.refusal('0 0 30 2 mon'), 'not refused', 'unless a weekday is enough');
select is(
    (
        select string_agg(z.name, ' | ')
        from unnest(array['CEST', 'CET', 'EET', 'MET', 'WET', 'UTC+2', 'Europe/Berln', 'Europe/Berln-3', '+02', '']) as z (name)
        where pg_temp.refusal('* * * * *', z.name) <> 'timezone must be the name of a time zone'
    ),
    null, 'an offset or an abbreviation is no time zone'
);
select is(
    -- Debian 13 has EST and EST5EDT in a package of their own.
    (select string_agg(z.name, ' ') from pg_timezone_names as z
    where z.name in ('UTC', 'GMT', 'EST', 'EST5EDT', 'Etc/GMT-2') and pg_temp.refusal('* * * * *', z.name) <> 'not refused'),
    null, 'unless that has no clock changes'
);
select is(
    pg_temp.slots('0 12 * * *', null, '2024-01-01'), '2024-01-01 12:00', 'a null time zone is UTC'
);
select throws_ok($$ select pgqueue.next_slots('@daily', slots => 0) $$, '22023', null, 'no slots are refused');
select throws_ok($$ select pgqueue.next_slots('@daily', after => 'infinity') $$, '22023', null, 'an infinite moment is refused');

select * from finish();
rollback;
