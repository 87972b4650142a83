//! Branches: new episodes from the middle of a recorded one, and the sandboxes that recorded calls are run in again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drillyard_agent::{Branch, Clocks, Recorded};
use drillyard_sandbox::{AllowList, Pool, SandboxConfig};
use drillyard_schema::{Purpose, StageRunId};
use drillyard_stage::exit::{INPUT, REFUSED, USAGE};
use drillyard_stage::{Failure, Outcome, Pipeline, SandboxSettings, Stage, visible_line};
use serde_json::json;

use super::drill::{
    Drill, PolicySpec, agent_failure, deciding, sandbox_config, sandboxes, started,
};
use super::faults::decides;
use super::replayed;
use crate::context::{Context, Run};

/// New episodes that leave a recorded one. They belong to a run of their own, so that no group of the parent's run has them among its
/// members.
pub(crate) struct BranchStage<'a> {
    drill: Drill<'a>,
    inputs: BTreeMap<String, String>,
    recorded: &'a Recorded,
    recorded_under: &'a Pipeline,
    at: u32,
}

impl<'a> BranchStage<'a> {
    /// `samples` episodes from step `at` of `recorded`, whose own settings `recorded_under` holds; today's decide what follows.
    pub(crate) fn new(
        context: &'a Context,
        recorded: &'a Recorded,
        recorded_under: &'a Pipeline,
        at: u32,
        samples: u32,
    ) -> Result<Self, Failure> {
        let parent = &recorded.episode;
        let pipeline = &context.pipeline;
        let purpose: Purpose = parent
            .purpose
            .parse()
            .map_err(|why| Failure::new(INPUT, format!("episode {}: {why}", parent.episode_id)))?;
        let policy = PolicySpec::of(pipeline, "branch", None, None)?;
        let mut more = BTreeMap::from([
            ("parent", parent.episode_id.to_string()),
            ("at", at.to_string()),
            ("seed", pipeline.seed.to_string()),
        ]);
        more.extend(decides(&pipeline.faults, purpose != Purpose::Train));
        let mut inputs = deciding(pipeline, &policy, &more)?;
        let parts: Vec<&str> = inputs
            .iter()
            .flat_map(|(key, value)| [key.as_str(), value.as_str()])
            .collect();
        let run = context.run(&format!("{}-branch", pipeline.name), &parts)?;
        inputs.insert("samples".to_owned(), samples.to_string());
        let drill = Drill {
            context,
            run,
            purpose,
            tasks: vec![recorded.task.clone()],
            samples,
            policy,
            seed: pipeline.seed,
            shard: Some((0, 1)),
            label: "branch".to_owned(),
        };
        Ok(Self {
            drill,
            inputs,
            recorded,
            recorded_under,
            at,
        })
    }

    /// The run the episodes belong to.
    pub(crate) fn run_identity(&self) -> &Run {
        &self.drill.run
    }

    /// The files as they were at the step, by running the calls before it once more.
    async fn by_running(&self) -> Result<Branch, Failure> {
        let context = self.drill.context;
        let clocks = clocks(self.recorded_under);
        let pool = as_recorded(context, self.recorded_under).await?;
        let (replay, branch) = drillyard_agent::branch(self.recorded, clocks, &pool, self.at)
            .await
            .map_err(|e| agent_failure(&e))?;
        if let Some(branch) = branch {
            return Ok(branch);
        }
        let parent = &self.recorded.episode;
        context
            .ui
            .text(&replayed::as_text(parent, &replay))
            .map_err(|e| Failure::io("standard output", &e))?;
        Err(Failure::new(
            REFUSED,
            format!(
                "episode {} can't be left at step {}: a call before it gives something else now, so the state the model saw can't be brought back",
                parent.episode_id, self.at
            ),
        )
        .hint("leave it at an earlier step"))
    }
}

impl Stage for BranchStage<'_> {
    const NAME: &'static str = "branch";
    const VERSION: i32 = 1;

    fn inputs(&self) -> BTreeMap<String, String> {
        self.inputs.clone()
    }

    async fn run(&self, _stage_run: &StageRunId) -> Result<Outcome, Failure> {
        let context = self.drill.context;
        let ui = &context.ui;
        let pool = sandboxes(context).await?;
        let ground =
            drillyard_agent::ground(self.recorded, &pool).map_err(|e| agent_failure(&e))?;
        for difference in &ground {
            ui.warn(format!(
                "another {} than the episode's",
                replayed::compared(difference)
            ));
        }
        let store = context.dir("artifacts")?;
        let kept = drillyard_agent::restore(self.recorded, &pool, self.at, &store)
            .await
            .map_err(|e| agent_failure(&e))?;
        let (branch, files) = match kept {
            Ok(branch) => (branch, "restored"),
            Err(missing) => {
                let why = missing.to_string();
                ui.note(format!(
                    "{:>10} {}; the calls before step {} are run again",
                    "branch",
                    visible_line(&why),
                    self.at
                ));
                (self.by_running().await?, "calls run again")
            }
        };
        let summary = self.drill.execute_in(pool, Some(branch)).await?;
        let snapshot = context
            .lake
            .snapshot()
            .await
            .map_err(|e| Failure::from_error(INPUT, &e))?;
        let parent = &self.recorded.episode;
        Ok(Outcome {
            read: BTreeMap::new(),
            written: json!({
                "episodes": snapshot.versions().get("episodes"),
                "run_date": self.drill.run.run_date,
            }),
            figures: json!({
                "parent": parent.episode_id,
                "at": self.at,
                "files": files,
                "episodes": summary.earlier + summary.done,
                "earlier": summary.earlier,
                "scored": summary.scored,
                "success": summary.success_rate(),
                "infrastructure": summary.infrastructure,
                "end_reasons": summary.end_reasons,
            }),
        })
    }
}

/// The clocks that calls were recorded under.
pub(crate) fn clocks(pipeline: &Pipeline) -> Clocks {
    let limits = &pipeline.sandbox.limits;
    Clocks {
        call: Duration::from_secs_f64(limits.call_s),
        episode: Duration::from_secs_f64(limits.episode_s),
    }
}

/// Sandboxes as an episode's settings made them, with what is today's to say.
///
/// # Errors
/// As [`started`].
pub(crate) async fn as_recorded(context: &Context, recorded: &Pipeline) -> Result<Pool, Failure> {
    let (settings, beyond) = on_todays_ground(&context.pipeline, recorded)?;
    if !beyond.is_empty() {
        context.ui.warn(format!(
            "the episode could reach {}; pipeline {} does not list it, so its calls can't reach it now",
            beyond.join(", "),
            context.pipeline.name
        ));
    }
    let config = SandboxConfig {
        pool_size: 1,
        ..sandbox_config(&settings)?
    };
    started(config, &settings.sandbox.require_limits, |_| Ok(())).await
}

/// Recorded settings as they may be used here, and the hosts they name beyond what today's pipeline lists. What a sandbox is and may use
/// comes from the record, or calls would not come to the same; where things lie, what may be reached and what the host must grant do not:
/// a record can't open a door that is shut today.
fn on_todays_ground(
    today: &Pipeline,
    recorded: &Pipeline,
) -> Result<(Pipeline, Vec<String>), Failure> {
    let (now, then) = (&today.sandbox, &recorded.sandbox);
    let (network, beyond) = agreed(&now.network, &then.network)?;
    let required: BTreeSet<&String> = now
        .require_limits
        .iter()
        .chain(&then.require_limits)
        .collect();
    let sandbox = SandboxSettings {
        network,
        network_cache: now.network_cache.clone(),
        require_limits: required.into_iter().cloned().collect(),
        oversubscription: now.oversubscription,
        ..then.clone()
    };
    let settings = Pipeline {
        yard: today.yard.clone(),
        sandbox,
        ..recorded.clone()
    };
    Ok((settings, beyond))
}

/// The entries of two allow lists that the other one covers, and those of the recorded list that today's does not.
fn agreed(today: &[String], recorded: &[String]) -> Result<(Vec<String>, Vec<String>), Failure> {
    let list =
        |entries: &[String]| AllowList::parse(entries).map_err(|e| Failure::from_error(USAGE, &e));
    if recorded.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    if today.is_empty() {
        return Ok((Vec::new(), recorded.to_vec()));
    }
    let covered =
        |by: &[String], entries: &[String]| -> Result<(Vec<String>, Vec<String>), Failure> {
            let by = list(by)?;
            let (mut inside, mut outside) = (Vec::new(), Vec::new());
            for entry in entries {
                let covered = by.covers(&list(std::slice::from_ref(entry))?);
                let side = if covered { &mut inside } else { &mut outside };
                side.push(entry.clone());
            }
            Ok((inside, outside))
        };
    let (mut both, beyond) = covered(today, recorded)?;
    both.extend(covered(recorded, today)?.0);
    both.sort();
    both.dedup();
    Ok((both, beyond))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipeline(sandbox: &str) -> Pipeline {
        let text = format!("name = 'p'\n{sandbox}");
        Pipeline::parse(&text, "p.toml", &[]).unwrap()
    }

    #[test]
    fn a_record_says_what_a_sandbox_is_and_not_what_it_may_reach() {
        let recorded = pipeline(
            "yard = 'elsewhere'
             [sandbox]
             network = ['a.example.org:443', 'b.example.org', '*.example.net:443']
             network_cache = 'their/cache'
             require_limits = ['disk']
             limits.memory_mib = 1000",
        );
        let today = pipeline(
            "yard = 'here'
             [sandbox]
             network = ['*.example.org', 'c.example.net:443', 'd.example.com']
             network_cache = 'our/cache'
             require_limits = ['all']
             limits.memory_mib = 2000",
        );
        let (settings, beyond) = on_todays_ground(&today, &recorded).unwrap();
        assert_eq!(settings.yard, "here");
        let sandbox = &settings.sandbox;
        assert_eq!(sandbox.network_cache, "our/cache");
        assert_eq!(sandbox.limits.memory_mib, 1000);
        assert_eq!(sandbox.require_limits, ["all", "disk"]);
        assert_eq!(
            sandbox.network,
            ["a.example.org:443", "b.example.org", "c.example.net:443"]
        );
        assert_eq!(beyond, ["*.example.net:443"]);
        let closed = pipeline("");
        let (settings, beyond) = on_todays_ground(&closed, &recorded).unwrap();
        assert!(settings.sandbox.network.is_empty() && beyond.len() == 3);
        let (settings, beyond) = on_todays_ground(&today, &closed).unwrap();
        assert!(settings.sandbox.network.is_empty() && beyond.is_empty());
    }
}
