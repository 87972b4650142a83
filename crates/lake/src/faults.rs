//! Named points at which a test can kill the process.

/// The environment variable that names a point; unset in ordinary runs.
pub const CRASH_VARIABLE: &str = "DRILLYARD_CRASH_AT";

/// Ends the process at once, as a kill -9 would, when the variable names this `point`. With `point:n` it is the n-th passage, from 1.
pub fn crash_point(point: &str) {
    use std::sync::atomic::{AtomicU64, Ordering};
    static PASSED: AtomicU64 = AtomicU64::new(0);
    let Some(wanted) = std::env::var_os(CRASH_VARIABLE) else {
        return;
    };
    let wanted = wanted.to_string_lossy();
    let (name, nth) = wanted
        .split_once(':')
        .map_or((wanted.as_ref(), 1), |(name, n)| {
            (name, n.parse().unwrap_or(1))
        });
    if name == point && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == nth {
        std::process::abort();
    }
}
