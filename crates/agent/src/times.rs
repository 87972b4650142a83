//! Texts that differ only in the time they were made at.
//!
//! `date`, `ls -l`, `stat` and error messages print the clock, which is another one in a replay. Such a word counts as equal only if it
//! tells the recorded run's own time in the recorded text and the replay's own in the replayed one: a date in a data file is data.

/// When something ran, in microseconds since 1970.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub from_us: i64,
    pub to_us: i64,
}

/// Sandboxes wait in a pool before they are used, and their directories bear that time.
const POOL_US: i64 = 3_600_000_000;
/// Clocks are read a little before and after.
const SLACK_US: i64 = 5_000_000;
const DAY_US: i64 = 86_400_000_000;
const MONTHS: [&str; 12] = [
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
];
const WEEKDAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];

/// Whether two outputs are equal but for words that tell the time of their own run. The recorded one comes first.
pub(crate) fn equal_but_for_times(a: &str, b: &str, windows: &(Window, Window)) -> bool {
    let mut times = false;
    let (mut words_a, mut words_b) = (words(a), words(b));
    loop {
        match (words_a.next(), words_b.next()) {
            (None, None) => return times,
            (Some(a), Some(b)) if a == b => {}
            (Some(a), Some(b)) => {
                let same_form = form(a, windows.0).zip(form(b, windows.1));
                if same_form.is_none_or(|(a, b)| a != b) {
                    return false;
                }
                times = true;
            }
            _ => return false,
        }
    }
}

/// Words and line ends; how many blanks stand between words follows from the words' widths.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n').flat_map(|line| {
        let end = line.ends_with('\n').then_some("\n");
        line.split_ascii_whitespace().chain(end)
    })
}

/// How a word tells a time within the window, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    TimeOfDay,
    Date,
    DateTime,
    Month,
    Weekday,
    Day,
    Seconds,
}

fn form(word: &str, window: Window) -> Option<Form> {
    let (from, to) = (window.from_us - POOL_US, window.to_us + SLACK_US);
    let days = from.div_euclid(DAY_US)..=to.div_euclid(DAY_US);
    let date_of = |text: &str| {
        let mut parts = text.split('-').map(str::parse::<i64>);
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(Ok(year)), Some(Ok(month)), Some(Ok(day)), None) if text.len() == 10 => {
                days.clone().find(|d| civil(*d) == (year, month, day))
            }
            _ => None,
        }
    };
    if date_of(word).is_some() {
        return Some(Form::Date);
    }
    if let Some(us) = time_of_day(word) {
        let near = days
            .clone()
            .any(|day| (from - 60_000_000..=to).contains(&(day * DAY_US + us)));
        return near.then_some(Form::TimeOfDay);
    }
    if let Some((date, time)) = word.split_once('T')
        && let Some(day) = date_of(date)
    {
        let time = time.trim_end_matches('Z');
        let time = time.split(['+', '-']).next().unwrap_or(time);
        let at = day * DAY_US + time_of_day(time)?;
        return (from - 60_000_000..=to)
            .contains(&at)
            .then_some(Form::DateTime);
    }
    let dates = || days.clone().map(civil);
    if let Some(month) = MONTHS.iter().position(|name| *name == word) {
        return dates()
            .any(|date| date.1 == month as i64 + 1)
            .then_some(Form::Month);
    }
    if let Some(weekday) = WEEKDAYS.iter().position(|name| *name == word) {
        return days
            .clone()
            .any(|day| day.rem_euclid(7) == weekday as i64)
            .then_some(Form::Weekday);
    }
    if !word
        .bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'.')
    {
        return None;
    }
    let whole: i64 = word.split('.').next()?.parse().ok()?;
    if whole < 32 && !word.contains('.') {
        return dates().any(|date| date.2 == whole).then_some(Form::Day);
    }
    (from / 1_000_000..=to / 1_000_000)
        .contains(&whole)
        .then_some(Form::Seconds)
}

/// Microseconds since midnight of `HH:MM`, `HH:MM:SS` or with a fraction.
fn time_of_day(word: &str) -> Option<i64> {
    let mut parts = word.split(':');
    let (hours, minutes, seconds) = (parts.next()?, parts.next()?, parts.next());
    if parts.next().is_some() || hours.len() != 2 || minutes.len() != 2 {
        return None;
    }
    let (hours, minutes) = (hours.parse::<i64>().ok()?, minutes.parse::<i64>().ok()?);
    let seconds: f64 = seconds.map_or(Some(0.0), |text| {
        text.bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.')
            .then(|| text.parse().ok())?
    })?;
    let valid = (0..24).contains(&hours) && (0..60).contains(&minutes) && seconds < 61.0;
    valid.then(|| (hours * 3600 + minutes * 60) * 1_000_000 + (seconds * 1e6) as i64)
}

/// Year, month and day of a day since 1970 (Howard Hinnant's `civil_from_days`).
fn civil(day: i64) -> (i64, i64, i64) {
    let z = day + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-01-02 03:04:05 UTC, a Friday, and 2026-11-30 10:00:00, a Monday.
    const THEN: i64 = 1_767_323_045_000_000;
    const NOW: i64 = 1_796_032_800_000_000;

    fn windows() -> (Window, Window) {
        let of = |at| Window {
            from_us: at - 2_000_000,
            to_us: at + 2_000_000,
        };
        (of(THEN), of(NOW))
    }

    #[test]
    fn days_have_their_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(THEN / DAY_US), (2026, 1, 2));
        assert_eq!(civil(NOW / DAY_US), (2026, 11, 30));
        assert_eq!(civil(11_016), (2000, 2, 29));
    }

    #[test]
    fn each_runs_own_time_is_equal() {
        for (then, now) in [
            (
                "Fri Jan  2 03:04:05 UTC 2026\n",
                "Mon Nov 30 10:00:00 UTC 2026\n",
            ),
            (
                "total 4\n-rw-r--r-- 1 u u 3 Jan  2 03:04 a\n",
                "total 4\n-rw-r--r-- 1 u u 3 Nov 30 09:59 a\n",
            ),
            (
                "2026-01-02 03:04:05.123456789 +0000",
                "2026-11-30 10:00:01.5 +0000",
            ),
            ("2026-01-02T03:04:05Z", "2026-11-30T10:00:00Z"),
            ("1767323045\n", "1796032800\n"),
        ] {
            assert!(equal_but_for_times(then, now, &windows()), "{then} {now}");
        }
    }

    #[test]
    fn other_times_are_data() {
        for (then, now) in [
            ("a 2026-01-03\n", "a 2026-11-30\n"),
            ("a 2026-01-02\n", "a 2026-11-29\n"),
            ("a 17:00\n", "a 10:00\n"),
            ("3 Jan\n", "4 Nov\n"),
            ("41\n", "42\n"),
            ("1767323045\n", "1767323046\n"),
            ("2026-01-02\n", "10:00\n"),
            ("03:04\n", "10:00"),
            ("same\n", "same\n"),
            ("x\n", "y\n"),
        ] {
            assert!(!equal_but_for_times(then, now, &windows()), "{then} {now}");
        }
    }
}
