//! Times of files as one number. File systems keep any second of 64 bits, and any program may set it.

const SECOND: i64 = 1_000_000_000;

/// Nanoseconds since 1970, from seconds and the rest; what does not fit is the nearest that does.
pub const fn nanoseconds(seconds: i64, rest: i64) -> i64 {
    seconds.saturating_mul(SECOND).saturating_add(rest)
}

/// The other way round: seconds, and the nanoseconds from there on.
pub const fn seconds(nanoseconds: i64) -> (i64, i64) {
    (
        nanoseconds.div_euclid(SECOND),
        nanoseconds.rem_euclid(SECOND),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_time_has_a_number() {
        for (time, number) in [
            ((0, 0), 0),
            ((-1, 999_999_999), -1),
            ((20_000_000_000, 5), i64::MAX),
            ((i64::MAX, 999_999_999), i64::MAX),
            ((i64::MIN, 0), i64::MIN),
        ] {
            assert_eq!(nanoseconds(time.0, time.1), number, "{time:?}");
        }
        for number in [0, -1, i64::MIN, i64::MAX] {
            let (seconds, rest) = seconds(number);
            assert!((0..SECOND).contains(&rest));
            assert_eq!(
                i128::from(seconds) * i128::from(SECOND) + i128::from(rest),
                i128::from(number)
            );
        }
    }
}
