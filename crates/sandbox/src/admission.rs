//! Admission: whether another sandbox may be leased now, judged by what sandboxes and host measurably use.
//!
//! A sandbox is *expected* to use its whole memory limit until enough was measured; from then on, what nine of ten
//! sandboxes stayed below, and a quarter more. A lease is granted when
//!
//! - none is leased (so that somebody always gets on), or
//! - the host is not short of memory by its own account, the expected use of one more fits into what is available, and
//!   the expected use of all leased ones fits [`Policy::oversubscription`] times into what sandboxes hold or could have.
//!
//! Other leases wait in the order they came. Processor time is not promised: a crowd of sandboxes is slow, not wrong,
//! unless [`Policy::cpu_pressure`] says otherwise.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::{Backend, SandboxError};

/// Nothing is expected to use less.
const LEAST_EXPECTED: u64 = 16 << 20;
/// So many measurements, of the last so many, replace the declared limit.
const ENOUGH: usize = 8;
const WINDOW: usize = 64;
/// How old readings may be, and how often whoever waits looks again.
const FRESH: Duration = Duration::from_millis(100);
/// A lease is taken to use what is expected of it for so long; then its use shows in the readings.
const YOUNG: Duration = Duration::from_secs(2);
/// How often the use of idle sandboxes is taken for a sample.
const SAMPLED: Duration = Duration::from_millis(500);

/// When leases are granted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// How many times over memory is promised, from 1 to 2.
    pub oversubscription: f64,
    /// Share of the host's memory that is left alone.
    pub reserve: f64,
    /// Leases pause while tasks waited for memory in more than so many percent of the last ten seconds.
    pub memory_pressure: f64,
    /// Likewise for processors; 100 for never.
    pub cpu_pressure: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            oversubscription: 2.0,
            reserve: 0.05,
            memory_pressure: 10.0,
            cpu_pressure: 100.0,
        }
    }
}

impl Policy {
    /// Refuses values that make no sense.
    pub fn check(&self) -> Result<(), SandboxError> {
        if (1.0..=2.0).contains(&self.oversubscription) {
            return Ok(());
        }
        Err(SandboxError::Config {
            field: "oversubscription",
            message: format!("{} is not between 1 and 2", self.oversubscription),
        })
    }
}

/// The state of the host at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Readings {
    /// Memory there is, in bytes: of the host, or as far as this program's own control group reaches.
    pub total_bytes: u64,
    /// Of it, what programs could still get without swapping.
    pub available_bytes: u64,
    /// Percent of the last ten seconds in which a task waited for memory; nothing where the kernel does not tell.
    pub memory_pressure: Option<f64>,
    /// Percent of the last ten seconds in which a task waited for a processor.
    pub cpu_pressure: Option<f64>,
}

/// Where readings come from.
pub trait Gauge: Send + Sync {
    /// Reads them now; an error lets every lease through.
    fn read(&self) -> std::io::Result<Readings>;
}

/// What sandboxes ask for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// Sandboxes leased now.
    pub live: usize,
    /// What each is expected to use, in bytes.
    pub expected_bytes: u64,
    /// What all use together, measured.
    pub used_bytes: u64,
}

/// Why a lease waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Tasks on this host wait for memory.
    MemoryPressure,
    /// Tasks on this host wait for processors.
    CpuPressure,
    /// What one more is expected to use is not available.
    NoRoom,
    /// What all are expected to use is too much.
    Oversubscribed,
}

/// An answer to a request for a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Granted.
    Admit,
    /// Not now.
    Wait(Why),
}

/// The rule, as a function of everything it depends on.
pub fn decide(policy: &Policy, host: &Readings, demand: &Demand) -> Verdict {
    if demand.live == 0 {
        return Verdict::Admit;
    }
    let above = |pressure: Option<f64>, most: f64| pressure.is_some_and(|p| p > most);
    if above(host.memory_pressure, policy.memory_pressure) {
        return Verdict::Wait(Why::MemoryPressure);
    }
    if above(host.cpu_pressure, policy.cpu_pressure) {
        return Verdict::Wait(Why::CpuPressure);
    }
    let reserve = (host.total_bytes as f64 * policy.reserve) as u64;
    let room = host.available_bytes.saturating_sub(reserve);
    if room < demand.expected_bytes {
        return Verdict::Wait(Why::NoRoom);
    }
    let capacity = room.saturating_add(demand.used_bytes) as f64;
    let promised = (demand.live as f64 + 1.0) * demand.expected_bytes as f64;
    if promised > capacity * policy.oversubscription {
        return Verdict::Wait(Why::Oversubscribed);
    }
    Verdict::Admit
}

/// What a sandbox is expected to use, learnt from what sandboxes used.
#[derive(Debug)]
struct Expectation {
    declared: u64,
    seen: VecDeque<u64>,
}

impl Expectation {
    fn note(&mut self, bytes: u64) {
        if self.seen.len() == WINDOW {
            self.seen.pop_front();
        }
        self.seen.push_back(bytes);
    }

    fn bytes(&self) -> u64 {
        if self.seen.len() < ENOUGH {
            return self.declared;
        }
        let mut sorted: Vec<u64> = self.seen.iter().copied().collect();
        sorted.sort_unstable();
        let most = sorted
            .get(sorted.len() * 9 / 10)
            .copied()
            .unwrap_or(self.declared);
        (most + most / 4).max(LEAST_EXPECTED).min(self.declared)
    }
}

/// How leases stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// Sandboxes leased now.
    pub live: usize,
    /// Leases that wait.
    pub waiting: usize,
    /// What a sandbox is expected to use, in bytes.
    pub expected_bytes: u64,
    /// Why the first of those that wait does.
    pub why: Option<Why>,
}

struct State {
    expectation: Expectation,
    read: Option<(Instant, Readings)>,
    /// When the young leases were granted.
    young: VecDeque<Instant>,
    sampled: Option<Instant>,
    why: Option<Why>,
}

/// The door that leases go through, one at a time and in order.
pub(crate) struct Door {
    policy: Policy,
    gauge: Box<dyn Gauge>,
    /// Tokio's locks are handed on in the order they were asked for.
    first: tokio::sync::Mutex<()>,
    released: Notify,
    live: AtomicUsize,
    waiting: AtomicUsize,
    state: Mutex<State>,
}

/// A granted lease; dropped unless it is kept.
pub(crate) struct Ticket<'a>(&'a Door);

impl Ticket<'_> {
    /// The lease lasts until [`Door::release`].
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Counts one that waits, as long as it does.
struct Waits<'a>(&'a AtomicUsize);

impl<'a> Waits<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Door {
    pub fn new(policy: Policy, gauge: Box<dyn Gauge>, declared: u64) -> Self {
        Self {
            policy,
            gauge,
            first: tokio::sync::Mutex::default(),
            released: Notify::new(),
            live: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            state: Mutex::new(State {
                expectation: Expectation {
                    declared,
                    seen: VecDeque::new(),
                },
                read: None,
                young: VecDeque::new(),
                sampled: None,
                why: None,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn standing(&self) -> Admission {
        let state = self.state();
        Admission {
            live: self.live.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
            expected_bytes: state.expectation.bytes(),
            why: state.why,
        }
    }

    pub fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Learns what a sandbox used at its peak.
    pub fn note(&self, bytes: u64) {
        self.state().expectation.note(bytes);
    }

    /// A lease ended.
    pub fn release(&self) {
        self.live.fetch_sub(1, Ordering::AcqRel);
        self.released.notify_one();
    }

    /// Comes back when a lease is granted.
    pub async fn enter(&self, backend: &dyn Backend) -> Ticket<'_> {
        let mut waits = None;
        let _first = if let Ok(first) = self.first.try_lock() {
            first
        } else {
            waits = Some(Waits::new(&self.waiting));
            self.first.lock().await
        };
        loop {
            // What the sandboxes use matters only where it is tight, and asking for it takes a moment.
            let mut verdict = self.judge(0);
            if verdict != Verdict::Admit
                && let Some(used) = backend.memory_bytes().await
            {
                self.note_average(used);
                verdict = self.judge(used);
            }
            let Verdict::Wait(why) = verdict else {
                let mut state = self.state();
                state.why = None;
                state.young.push_back(Instant::now());
                self.live.fetch_add(1, Ordering::AcqRel);
                return Ticket(self);
            };
            waits.get_or_insert_with(|| Waits::new(&self.waiting));
            if self.state().why.replace(why) != Some(why) {
                tracing::debug!(?why, live = self.live(), "a lease waits");
            }
            let _ = tokio::time::timeout(FRESH, self.released.notified()).await;
        }
    }

    fn judge(&self, used_bytes: u64) -> Verdict {
        let mut state = self.state();
        let fresh = state.read.filter(|(at, _)| at.elapsed() < FRESH);
        let mut host = match fresh {
            Some((_, host)) => host,
            None => match self.gauge.read() {
                Ok(host) => {
                    state.read = Some((Instant::now(), host));
                    host
                }
                Err(error) => {
                    tracing::warn!(%error, "the host's memory cannot be read; every lease is granted");
                    return Verdict::Admit;
                }
            },
        };
        while state.young.front().is_some_and(|at| at.elapsed() > YOUNG) {
            state.young.pop_front();
        }
        let live = self.live();
        let expected_bytes = state.expectation.bytes();
        // Some of the young have ended already, but never more are left than there are.
        let young = state.young.len().min(live) as u64;
        host.available_bytes = host
            .available_bytes
            .saturating_sub(young.saturating_mul(expected_bytes));
        let demand = Demand {
            live,
            expected_bytes,
            used_bytes,
        };
        decide(&self.policy, &host, &demand)
    }

    /// While leases wait, what those that live use on average is as good a sample as a call's peak: sandboxes that are
    /// held and idle must not keep others out for ever.
    fn note_average(&self, used: u64) {
        let live = self.live() as u64;
        let mut state = self.state();
        if live > 0 && state.sampled.is_none_or(|at| at.elapsed() > SAMPLED) {
            state.sampled = Some(Instant::now());
            state.expectation.note(used / live);
        }
    }
}

/// Readings of this host: `/proc/meminfo`, `/proc/pressure`, and the memory limits of the control groups this program
/// lives in.
#[derive(Debug)]
pub struct HostGauge {
    groups: Vec<Group>,
}

/// A control group with a memory limit.
#[derive(Debug)]
struct Group {
    limit: u64,
    usage: PathBuf,
    stat: PathBuf,
}

impl HostGauge {
    /// Looks for the control groups once.
    pub fn new() -> Self {
        let read = |path: &str| fs_err::read_to_string(path).unwrap_or_default();
        Self {
            groups: groups(
                &read("/proc/self/cgroup"),
                &read("/proc/self/mountinfo"),
                &|path| fs_err::read_to_string(path).ok(),
            ),
        }
    }
}

impl Default for HostGauge {
    fn default() -> Self {
        Self::new()
    }
}

impl Gauge for HostGauge {
    fn read(&self) -> std::io::Result<Readings> {
        let memory = fs_err::read_to_string("/proc/meminfo")?;
        let of = |key: &str| field(&memory, key).map(|kib| kib << 10);
        let (Some(total), Some(available)) = (of("MemTotal:"), of("MemAvailable:")) else {
            return Err(std::io::Error::other(
                "/proc/meminfo tells no MemTotal and MemAvailable",
            ));
        };
        let mut readings = Readings {
            total_bytes: total,
            available_bytes: available,
            memory_pressure: pressure("/proc/pressure/memory"),
            cpu_pressure: pressure("/proc/pressure/cpu"),
        };
        for group in &self.groups {
            let usage = fs_err::read_to_string(&group.usage).unwrap_or_default();
            let Ok(usage) = usage.trim().parse::<u64>() else {
                continue;
            };
            let stat = fs_err::read_to_string(&group.stat).unwrap_or_default();
            // Version 1 tells of the group alone first, and of all below it under this name.
            let cache = field(&stat, "total_inactive_file")
                .or_else(|| field(&stat, "inactive_file"))
                .unwrap_or(0);
            let available = group.limit.saturating_sub(usage.saturating_sub(cache));
            readings.total_bytes = readings.total_bytes.min(group.limit);
            readings.available_bytes = readings.available_bytes.min(available);
        }
        Ok(readings)
    }
}

/// The number after a word at the start of a line.
fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(key)).then(|| words.next()?.parse().ok())?
    })
}

/// `some avg10=1.23 …`
fn pressure(path: &str) -> Option<f64> {
    let text = fs_err::read_to_string(path).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("some "))?;
    line.split_whitespace()
        .find_map(|word| word.strip_prefix("avg10=")?.parse().ok())
}

/// The groups from this program's own upwards that limit memory.
fn groups(own: &str, mounts: &str, read: &dyn Fn(&Path) -> Option<String>) -> Vec<Group> {
    let mut found = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (kind, files) = match controllers {
            "" => ("cgroup2", ["memory.max", "memory.current"]),
            list if list.split(',').any(|c| c == "memory") => {
                ("cgroup", ["memory.limit_in_bytes", "memory.usage_in_bytes"])
            }
            _ => continue,
        };
        let Some((root, point)) = mounts.lines().find_map(|l| mount(l, kind)) else {
            continue;
        };
        let inner = path
            .strip_prefix(root.trim_end_matches('/'))
            .unwrap_or(path);
        let point = Path::new(point);
        let mut dir = point.join(inner.trim_start_matches('/'));
        while dir.starts_with(point) {
            let limit = read(&dir.join(files[0])).and_then(|t| t.trim().parse::<u64>().ok());
            // "max" is no number; version 1 says no limit by one near 2^63.
            if let Some(limit) = limit.filter(|limit| *limit < 1 << 60) {
                found.push(Group {
                    limit,
                    usage: dir.join(files[1]),
                    stat: dir.join("memory.stat"),
                });
            }
            if !dir.pop() {
                break;
            }
        }
    }
    found
}

/// Root and place of a mount of control groups, if a line of mountinfo tells of one with memory in it.
fn mount<'a>(line: &'a str, kind: &str) -> Option<(&'a str, &'a str)> {
    let (before, after) = line.split_once(" - ")?;
    let mut after = after.split(' ');
    let fits = after.next()? == kind
        && (kind == "cgroup2" || after.nth(1)?.split(',').any(|o| o == "memory"));
    let mut before = before.split(' ').skip(3);
    fits.then(|| Some((before.next()?, before.next()?)))?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn policy(oversubscription: f64) -> Policy {
        Policy {
            oversubscription,
            ..Policy::default()
        }
    }

    prop_compose! {
        fn any_case()(
            factor in 1.0..=2.0,
            total in 256..65_536_u64,
            free in 0.0..=1.0,
            memory_pressure in prop::option::of(0.0..100.0),
            live in 0..300_usize,
            expected in 16..8192_u64,
            used in 0..65_536_u64,
        ) -> (Policy, Readings, Demand) {
            let host = Readings {
                total_bytes: total * MIB,
                available_bytes: ((total * MIB) as f64 * free) as u64,
                memory_pressure,
                cpu_pressure: Some(100.0),
            };
            let demand = Demand {
                live,
                expected_bytes: expected * MIB,
                used_bytes: used * MIB,
            };
            (policy(factor), host, demand)
        }
    }

    proptest! {
        // Most cases are refused, and say little.
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn what_is_granted_fits((policy, host, demand) in any_case()) {
            if decide(&policy, &host, &demand) == Verdict::Admit && demand.live > 0 {
                prop_assert!(host.memory_pressure.unwrap_or(0.0) <= policy.memory_pressure);
                // Measured use with the newcomer's stays within the memory there is …
                prop_assert!(demand.expected_bytes <= host.available_bytes);
                // … and what is expected of all within so many times that.
                let all = (demand.live as u64 + 1) * demand.expected_bytes;
                let capacity = host.available_bytes + demand.used_bytes;
                prop_assert!(all as f64 <= capacity as f64 * policy.oversubscription);
            }
        }

        #[test]
        fn somebody_always_gets_on((policy, host, demand) in any_case()) {
            let alone = Demand { live: 0, ..demand };
            prop_assert_eq!(decide(&policy, &host, &alone), Verdict::Admit);
        }

        #[test]
        fn more_room_or_less_demand_never_refuses(
            (policy, host, demand) in any_case(),
            more in 0..1_u64 << 34,
            fewer in 0..300_usize,
            less in 0..1_u64 << 33,
            factor in 0.0..1.0,
        ) {
            if decide(&policy, &host, &demand) != Verdict::Admit {
                return Ok(());
            }
            let eased = [
                (policy, Readings { available_bytes: host.available_bytes + more, ..host }, demand),
                (policy, Readings { memory_pressure: None, cpu_pressure: None, ..host }, demand),
                (policy, host, Demand { live: demand.live.saturating_sub(fewer), ..demand }),
                (policy, host, Demand { expected_bytes: demand.expected_bytes.saturating_sub(less), ..demand }),
                (Policy { oversubscription: policy.oversubscription + factor, ..policy }, host, demand),
            ];
            for (policy, host, demand) in eased {
                prop_assert_eq!(decide(&policy, &host, &demand), Verdict::Admit);
            }
        }

        #[test]
        fn the_expectation_stays_between_floor_and_limit(
            declared in 16..8192_u64,
            seen in prop::collection::vec(0..16_384_u64, 0..200),
        ) {
            let mut expectation = Expectation { declared: declared * MIB, seen: VecDeque::new() };
            for bytes in &seen {
                expectation.note(bytes * MIB);
            }
            let expected = expectation.bytes();
            prop_assert!((LEAST_EXPECTED..=declared * MIB).contains(&expected));
            if seen.len() < ENOUGH {
                prop_assert_eq!(expected, declared * MIB);
            }
        }
    }

    #[test]
    fn before_anything_is_measured_the_declared_limit_counts() {
        // 24 GiB, nothing used, limits of 4 GiB each, 5 % kept: 5 at factor 1, 11 at factor 2.
        for (factor, most) in [(1.0, 5), (2.0, 11)] {
            let host = Readings {
                total_bytes: 24 << 30,
                available_bytes: 24 << 30,
                ..Readings::default()
            };
            let granted = (0..100)
                .take_while(|live| {
                    let demand = Demand {
                        live: *live,
                        expected_bytes: 4 << 30,
                        used_bytes: 0,
                    };
                    decide(&policy(factor), &host, &demand) == Verdict::Admit
                })
                .count();
            assert_eq!(granted, most, "{factor}");
        }
    }

    #[test]
    fn the_own_groups_limits_are_found_upwards() {
        let files = |path: &Path| {
            Some(
                match path.to_str()? {
                    "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes" => "9223372036854771712",
                    "/sys/fs/cgroup/memory/a/memory.limit_in_bytes" => "1073741824",
                    _ => return None,
                }
                .to_owned(),
            )
        };
        let found = groups(
            "5:cpu:/a/b\n4:memory:/a/b\n0::/x\n",
            "30 29 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n",
            &files,
        );
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].limit, 1 << 30);
        assert!(found[0].usage.ends_with("memory/a/memory.usage_in_bytes"));
    }

    #[test]
    fn this_host_can_be_read() {
        let readings = HostGauge::new().read().unwrap();
        assert!(readings.available_bytes > 0 && readings.available_bytes <= readings.total_bytes);
    }
}
