//! The scripted expert: the task set's own script, as a policy.

use drillyard_gym::task_set;
use futures::future::BoxFuture;

use super::{PolicyClient, PolicyError, ToolProtocol, TurnReply, TurnRequest};

/// Plays the script of the task's own set. Which episodes carry the family's systematic mistake follows from the episode's seed.
#[derive(Debug, Clone, Copy)]
pub struct ExpertClient {
    mistake_rate: f64,
}

impl ExpertClient {
    /// An expert that is wrong in this share of episodes (0 to 1).
    pub const fn new(mistake_rate: f64) -> Self {
        Self { mistake_rate }
    }

    fn turn_now(self, request: TurnRequest<'_>) -> Result<TurnReply, PolicyError> {
        let Some(set) = task_set(&request.task.task_set) else {
            let set = &request.task.task_set;
            return Err(PolicyError::Config(format!(
                "task set '{set}' has no scripted expert"
            )));
        };
        let mut script = set.expert(request.task, request.episode_seed, self.mistake_rate);
        let step = request.step as usize;
        // A script that is over says nothing, which ends the episode as given up.
        let text = if step < script.len() {
            script.swap_remove(step).text
        } else {
            String::new()
        };
        Ok(TurnReply::text(text))
    }
}

impl PolicyClient for ExpertClient {
    fn protocol(&self) -> ToolProtocol {
        ToolProtocol::Template
    }

    fn turn<'a>(
        &'a self,
        request: TurnRequest<'a>,
    ) -> BoxFuture<'a, Result<TurnReply, PolicyError>> {
        Box::pin(std::future::ready(self.turn_now(request)))
    }
}
