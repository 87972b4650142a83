//! Why a rollout could not go on.

use drillyard_gym::GymError;
use drillyard_lake::LakeError;
use drillyard_sandbox::SandboxError;
use drillyard_schema::EpisodeId;

use crate::policy::PolicyError;

/// Why a rollout could not go on. What had ended is in the lake or the journal; the same command goes on from there.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Nobody answers at the endpoint, or it refuses us.
    #[error("the policy does not answer")]
    Policy(#[source] PolicyError),
    /// The endpoint failed for one episode after the other.
    #[error("the endpoint failed for {faults} episodes in a row")]
    EndpointGone {
        /// How many.
        faults: u32,
        /// The last failure.
        #[source]
        last: PolicyError,
    },
    /// The sandbox failed for one episode after the other.
    #[error("the sandbox failed for {faults} episodes in a row; the last time: {last}")]
    SandboxGone {
        /// How many.
        faults: u32,
        /// What it said.
        last: String,
    },
    /// The lake or the journal can't be read or written.
    #[error("the lake can't be used")]
    Lake(#[from] LakeError),
    /// No sandbox can be had.
    #[error("no sandbox")]
    Sandbox(#[from] SandboxError),
    /// A task set, tool or asset is missing.
    #[error("the tasks can't be set up")]
    Gym(#[from] GymError),
    /// An output too large for a row could not be kept.
    #[error("artifact {path}")]
    Artifact {
        /// Where it should lie.
        path: String,
        /// What the disk said.
        #[source]
        source: std::io::Error,
    },
    /// The options make no sense.
    #[error("{0}")]
    Options(String),
    /// No new episode can go on from there.
    #[error("episode {episode} can't be left at step {step}: {why}")]
    CannotLeave {
        /// The episode.
        episode: EpisodeId,
        /// The step asked for.
        step: u32,
        /// The cause.
        why: String,
        /// What can be done instead.
        way_out: String,
    },
    /// A worker ended without a result; a defect of Drillyard.
    #[error("an episode's worker ended without a result: {0}")]
    Worker(String),
}
