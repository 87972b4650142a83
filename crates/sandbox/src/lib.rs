//! Sandboxes for code nobody vouches for: isolated, equal at every start, measured call by call.
//!
//! A [`Pool`] keeps sandboxes ready. [`Pool::lease`] hands one out with its set-up files written, [`Sandbox::call`]
//! runs tools in it, and a used sandbox is never handed out again: reset and restore swap in a fresh one.
//!
//! ```no_run
//! # async fn example() -> Result<(), drillyard_sandbox::SandboxError> {
//! use drillyard_sandbox::{Call, Pool, SandboxConfig, Setup};
//!
//! let pool = Pool::start(SandboxConfig::default()).await?;
//! eprintln!("{}", pool.limits());
//! let setup = Setup::new([("in.csv", &b"a,b\n1,2\n"[..])]);
//! let mut sandbox = pool.lease(&setup).await?;
//! let result = sandbox.call(Call::shell("cut -d, -f2 in.csv > out.txt")).await?;
//! assert_eq!(result.files_changed[0].path, "out.txt");
//! sandbox.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! # How it is built
//!
//! ```text
//! this program (threads, async) ── control socket ──▶ helper (one thread, static, empty environment)
//!        │                                             └─ clones ─▶ PID 1 of each sandbox ─▶ tools
//!        └────────────── one socket a sandbox ─────────────────────────▲
//! ```
//!
//! This program never forks: a threaded process cannot do so safely. The helper is PID 1 of a pid namespace that holds
//! every sandbox and ends when its socket closes, so killing this program at any moment leaves no process and no
//! mount; control groups that a killed helper left are swept at the next start. Nothing is written to the host's disk but
//! images, layers and saved states, in directories the caller names.
//!
//! Whoever runs a tool's output through here gets it as data: the host opens no path that code inside controls.
//!
//! Backends implement [`Backend`]; they only have to bring up a place where PID 1 of `drillyard-sandbox-init` runs and
//! carry a byte stream to it.

mod admission;
mod backend;
mod call;
mod client;
mod config;
mod docker;
mod error;
mod faults;
mod filter;
mod host;
mod image;
mod layers;
mod local;
mod network;
mod pipe;
mod pool;
mod proxy;
mod report;
mod sandbox;
mod saved;
mod snapshot;
mod unfinished;

pub use admission::{Admission, Demand, Gauge, HostGauge, Policy, Readings, Verdict, Why, decide};
pub use backend::{Autopsy, Backend, Boxed, Cell, Stream};
pub use call::{Call, CallOutcome, CallResult, ChangedFile, LimitWarning, Reason, Stop};
pub use config::{Image, Limits, SandboxConfig};
pub use drillyard_sandbox_init::control::{Holds, LimitRow};
pub use drillyard_sandbox_init::init::{Change, Kind};
pub use error::SandboxError;
pub use faults::{Fault, FaultKind, FaultPlan, FaultRule};
pub use image::{ImageCaps, ImageStore, Recipe, RecipeFile, StoredImage};
pub use network::{AllowList, CacheUse, Network, NetworkLimits, NetworkRequest, NetworkVerdict};
pub use pool::{Pool, Setup};
pub use proxy::{Accept, Proxy, Traffic};
pub use report::{ImageReport, LimitsReport};
pub use sandbox::Sandbox;
pub use saved::Saved;
pub use snapshot::Snapshot;
