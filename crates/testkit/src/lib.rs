//! What the tests of other crates need and must not write twice.
//!
//! - [`synthetic_bundle`], [`synthetic_run`], [`synthetic_lake`]: episodes made up from a seed, consistent across tables, with every
//!   kind of end, failure and flaw in fixed shares; no sandbox or model is involved.
//! - [`FakeEndpoint`]: a server that speaks the OpenAI chat API from a script and can misbehave: refuse with `Retry-After`, fail,
//!   stall, cut the connection, answer garbage or hostile text. It counts tokens honestly (a byte each), so token bookkeeping can be
//!   checked to the last id.
//!
//! A dev-dependency only: nothing that ships uses it.

mod endpoint;
mod synthetic;

pub use endpoint::{Answer, FakeEndpoint, FakeRequest, Hostile, render_bytes};
pub use synthetic::{
    SyntheticOptions, synthetic_bundle, synthetic_lake, synthetic_run, write_bundles,
};
