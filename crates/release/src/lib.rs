//! Which policy is the champion, and how it moves.
//!
//! A [`Registry`] is a small folder: `<pipeline>.json` names the champion, written beside and renamed, so that a reader sees the old
//! one or the new one. A candidate becomes champion only if its validation does not fall below the champion's.
//!
//! It trains nothing and runs no episode; whoever measured the two hands the figures in.

mod registry;

pub use registry::{Champion, Registry, RegistryError, Verdict};
