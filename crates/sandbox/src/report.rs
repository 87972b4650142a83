//! What a host grants: said at start, kept in each episode's record.

use std::fmt;

use serde::{Deserialize, Serialize};

use drillyard_sandbox_init::control::{Holds, LimitRow};

use crate::SandboxError;

/// Stands for every limit in [`LimitsReport::require`].
const ALL: &str = "all";

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
        self.rows
            .iter()
            .filter(|row| matches!(row.holds, Holds::Partly | Holds::No))
    }

    /// The row of a limit.
    pub fn row(&self, limit: &str) -> Option<&LimitRow> {
        self.rows.iter().find(|row| row.limit == limit)
    }

    /// Refuses unless these limits hold in full; `all` stands for every limit that is configured. The error names each
    /// that does not, why, and the way out.
    pub fn require(&self, limits: &[&str]) -> Result<(), SandboxError> {
        let known = |name: &str| name == ALL || self.row(name).is_some();
        if let Some(name) = limits.iter().find(|name| !known(name)) {
            let names: Vec<&str> = self.rows.iter().map(|row| row.limit.as_str()).collect();
            return Err(SandboxError::Config {
                field: "require_limits",
                message: format!(
                    "there is no limit '{name}'; there are: {ALL}, {}",
                    names.join(", ")
                ),
            });
        }
        let failing: Vec<String> = self
            .rows
            .iter()
            .filter(|row| match row.holds {
                Holds::Yes => false,
                Holds::Partly | Holds::No => {
                    limits.iter().any(|name| *name == ALL || *name == row.limit)
                }
                Holds::Unset => limits.contains(&row.limit.as_str()),
            })
            .map(|row| self.shortfall(row))
            .collect();
        if failing.is_empty() {
            Ok(())
        } else {
            Err(SandboxError::LimitsDoNotHold {
                limits: failing.join("\n"),
            })
        }
    }

    fn shortfall(&self, row: &LimitRow) -> String {
        let way_out = match row.holds {
            Holds::Unset => "set it in sandbox.limits",
            _ if row.how.contains(NOT_ASKED_FOR) => "set sandbox.control_groups to true",
            _ if self.mode == "user" => {
                "run as root, or in a control group of version 2 that is delegated to you with its memory, pids, cpu and io \
                 controllers (systemd-run --user --scope -p Delegate=yes COMMAND), or do not require it"
            }
            _ => {
                "mount the controller and let this program make groups in it, or do not require it"
            }
        };
        let holds = match row.holds {
            Holds::Yes => "holds",
            Holds::Partly => "holds in part",
            Holds::No => "does not hold",
            Holds::Unset => "is not set",
        };
        format!(
            "  {} ({}) {holds}: {}\n    way out: {way_out}",
            row.limit, row.value, row.how
        )
    }
}

/// What the helper gives as the reason where `control_groups` is false.
const NOT_ASKED_FOR: &str = "not asked for";

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
                Holds::Unset => "no limit",
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
        let error = report.require(&["all"]).unwrap_err().to_string();
        assert!(
            error.contains("processors (2) does not hold: because\n    way out: run as root"),
            "{error}"
        );
        report.require(&["disk"]).unwrap();
        report.require(&[]).unwrap();
        let error = report.require(&["disc"]).unwrap_err().to_string();
        assert!(
            error.contains("no limit 'disc'; there are: all, disk, processors"),
            "{error}"
        );
        assert_eq!(
            report.weak().map(|r| r.limit.as_str()).collect::<Vec<_>>(),
            ["processors"]
        );
    }
}
