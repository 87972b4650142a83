//! What a host grants: said at start, kept in each episode's record.

use std::fmt;

use serde::{Deserialize, Serialize};

use drillyard_sandbox_init::control::{Holds, LimitRow};

/// Which limit holds here, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsReport {
    /// `local` or `docker`.
    pub backend: String,
    /// `root` or `user`: whose privileges the sandboxes are made with.
    pub mode: String,
    /// A row for each limit.
    pub rows: Vec<LimitRow>,
}

impl LimitsReport {
    /// The limits that do not hold, or hold in part.
    pub fn weak(&self) -> impl Iterator<Item = &LimitRow> {
        self.rows.iter().filter(|row| row.holds != Holds::Yes)
    }
}

impl fmt::Display for LimitsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |text: fn(&LimitRow) -> &str| {
            self.rows.iter().map(|r| text(r).len()).max().unwrap_or(0)
        };
        let (a, b) = (width(|r| &r.limit), width(|r| &r.value));
        writeln!(f, "sandbox limits ({}, as {})", self.backend, self.mode)?;
        for row in &self.rows {
            let holds = match row.holds {
                Holds::Yes => "holds  ",
                Holds::Partly => "partly ",
                Holds::No => "DOESN'T",
            };
            writeln!(
                f,
                "  {:a$}  {:b$}  {holds}  {}",
                row.limit, row.value, row.how
            )?;
        }
        Ok(())
    }
}

/// Which root file system the sandboxes have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageReport {
    /// `host`.
    pub name: String,
    /// BLAKE3 over what identifies it: for `host` the distribution, its list of installed packages, the allowed paths
    /// and the helper programs.
    pub digest: String,
    /// The distribution's name, as its os-release tells.
    pub system: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_what_does_not_hold() {
        let row = |limit: &str, holds| LimitRow {
            limit: limit.into(),
            value: "2".into(),
            holds,
            how: "because".into(),
        };
        let report = LimitsReport {
            backend: "local".into(),
            mode: "user".into(),
            rows: vec![row("disk", Holds::Yes), row("processors", Holds::No)],
        };
        assert_eq!(
            report.to_string(),
            "sandbox limits (local, as user)\n  disk        2  holds    because\n  processors  2  DOESN'T  because\n"
        );
        assert_eq!(
            report.weak().map(|r| r.limit.as_str()).collect::<Vec<_>>(),
            ["processors"]
        );
    }
}
