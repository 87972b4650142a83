//! InterCode result files: `{"0": {environment, dataset, task_id, query, hardness?, turn_history, summary, info?}, …}`.
//!
//! `turn_history` holds parallel arrays: `actions`, `observations`, `rewards`, `valid_action`, and `thoughts` where the agent
//! was prompted to reason first. What the format is like, and what is made of it:
//! - A turn's reward is what submitting at that turn would have earned, so the episode's reward is the **largest**, not the last;
//!   each turn's is kept as `turn_reward` and the last one as `last_reward`.
//! - An action that the environment refused to run (its observation explains the format) is a parse error without a call.
//! - A code fence around an action is taken off and the step marked as repaired.
//! - `valid_action` may be null or absent (the python environment): such calls count as run.
//! - A last action `blocked` without an observation means that the model's endpoint withheld the reply. That is no doing of the
//!   agent, so the episode ends as an endpoint fault unless it had already succeeded.
//! - The policy's name is not in the file, only in its name: `ic_sql_multiturn_gpt-4_10_turns.json`.
//!
//! The questions are those of public evaluation sets (Spider's dev part, NL2Bash), and are marked so.

use camino::Utf8Path;
use drillyard_lake::EpisodeBundle;
use drillyard_schema::ids::derive_id;
use drillyard_schema::{CallOutcome, EndReason, ParseStatus, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::ImportOptions;
use crate::record::{Builder, Call, PolicyFacts, Spoken, TaskFacts, Turn};

const SCHEME: &str = "intercode";

#[derive(Deserialize)]
struct Recorded {
    environment: String,
    #[serde(default)]
    dataset: Option<String>,
    task_id: u64,
    query: String,
    #[serde(default)]
    hardness: Option<String>,
    turn_history: History,
    summary: Summary,
    #[serde(default)]
    info: Option<Value>,
}

#[derive(Deserialize)]
struct History {
    actions: Vec<String>,
    observations: Vec<Option<String>>,
    rewards: Vec<f64>,
    #[serde(default)]
    valid_action: Option<Vec<Option<bool>>>,
    #[serde(default)]
    thoughts: Option<Vec<Option<String>>>,
}

#[derive(Deserialize)]
struct Summary {
    max_reward: f64,
    turns_taken: i64,
    turns_max: i64,
    #[serde(default)]
    max_reward_idx: Option<i64>,
    #[serde(default)]
    num_submissions: Option<i64>,
}

/// Which dialect of actions an environment speaks.
struct Dialect {
    task_set: &'static str,
    tool: &'static str,
    argument: &'static str,
    toolset: &'static str,
    licence: &'static str,
}

fn dialect(environment: &str) -> Result<Dialect, String> {
    let (task_set, tool, argument, toolset, licence) = match environment {
        "ic_sql" => (
            "intercode_sql",
            "execute_sql",
            "query",
            "intercode-sql",
            "MIT (InterCode); questions and databases CC BY-SA 4.0 (Spider)",
        ),
        "ic_bash" => (
            "intercode_bash",
            "execute_shell",
            "command",
            "intercode-bash",
            "MIT (InterCode); questions derived from NL2Bash",
        ),
        "ic_python" => (
            "intercode_python",
            "execute_python",
            "code",
            "intercode-python",
            "MIT (InterCode)",
        ),
        "ic_ctf" => (
            "intercode_ctf",
            "execute_shell",
            "command",
            "intercode-ctf",
            "MIT (InterCode)",
        ),
        other => {
            return Err(format!(
                "environment '{other}' is none of ic_bash, ic_ctf, ic_python, ic_sql"
            ));
        }
    };
    Ok(Dialect {
        task_set,
        tool,
        argument,
        toolset,
        licence,
    })
}

/// One record as an episode. `key` is the record's key in the file.
pub fn episode(
    value: Value,
    key: &str,
    file: &Utf8Path,
    options: &ImportOptions,
) -> Result<EpisodeBundle, String> {
    let record: Recorded =
        serde_json::from_value(value).map_err(|e| format!("not an InterCode record: {e}"))?;
    if key != record.task_id.to_string() {
        return Err(format!("key {key} and task_id {} differ", record.task_id));
    }
    let dialect = dialect(&record.environment)?;
    let turns = turns(&record)?;
    let dataset = record.dataset.as_deref().unwrap_or(&record.environment);
    let family = Utf8Path::new(dataset)
        .file_stem()
        .unwrap_or(dataset)
        .to_owned();
    let strategy = if record.turn_history.thoughts.is_some() {
        "react"
    } else {
        "multiturn"
    };
    let policy = options.policy.clone().unwrap_or_else(|| policy_name(file));
    let mut episode = Builder::new(
        TaskFacts {
            task_set: dialect.task_set,
            task_set_version: "1",
            evaluation_set: !family.contains("train"),
            family,
            index: record.task_id,
            difficulty: record.hardness.as_deref().and_then(difficulty),
            instruction: record.query.clone(),
            verifier: None,
            source: "InterCode (github.com/princeton-nlp/intercode)",
            licence: dialect.licence,
        },
        PolicyFacts {
            policy,
            revision: strategy.to_owned(),
            sample: 0,
            prompt_hash: derive_id(&["prompt", dialect.toolset, strategy], 16),
            toolset_version: dialect.toolset.to_owned(),
        },
        file,
        options,
    );

    episode.message(None, Spoken::text("user", record.query.clone()));
    let mut blocked = false;
    for (index, turn) in turns.iter().enumerate() {
        blocked = turn.blocked();
        add_turn(&mut episode, &dialect, index, turn);
        episode.reward(SCHEME, Some(index as i32), "turn_reward", turn.reward);
    }
    let best = record.summary.max_reward;
    episode.reward(SCHEME, None, "outcome", best);
    if let Some(last) = turns.last() {
        episode.reward(SCHEME, None, "last_reward", last.reward);
    }
    episode.verdict(SCHEME, best, None);

    let solved = best >= 1.0 - 1e-6;
    let (end, cause) = if blocked && !solved {
        let cause = "the model's endpoint withheld the reply (recorded as 'blocked')";
        (EndReason::EndpointFault, Some(cause.to_owned()))
    } else if turns.last().is_some_and(|t| t.action.trim() == "submit") {
        (EndReason::Submitted, None)
    } else if !solved && record.summary.turns_taken >= record.summary.turns_max {
        (EndReason::StepLimit, None)
    } else {
        (EndReason::Other, None)
    };
    let mut extras = Map::new();
    extras.insert("task_id".to_owned(), json!(record.task_id));
    extras.insert("turns_max".to_owned(), json!(record.summary.turns_max));
    if let Some(dataset) = &record.dataset {
        extras.insert("dataset".to_owned(), json!(dataset));
    }
    if let Some(hardness) = &record.hardness {
        extras.insert("hardness".to_owned(), json!(hardness));
    }
    if let Some(index) = record.summary.max_reward_idx {
        extras.insert("max_reward_idx".to_owned(), json!(index));
    }
    if let Some(submissions) = record.summary.num_submissions {
        extras.insert("num_submissions".to_owned(), json!(submissions));
    }
    if let Some(info) = record.info {
        extras.insert("info".to_owned(), info);
    }
    Ok(episode.finish(end, cause, extras))
}

/// One turn, out of the parallel arrays.
struct RecordedTurn<'a> {
    action: &'a str,
    thought: Option<&'a str>,
    observation: Option<&'a str>,
    reward: f64,
    valid: Option<bool>,
}

impl RecordedTurn<'_> {
    fn blocked(&self) -> bool {
        self.observation.is_none() && self.action == "blocked"
    }

    /// The environment did not run the action but explained how one must look.
    fn refused(&self) -> bool {
        self.valid == Some(false)
            && self
                .observation
                .is_some_and(|o| o.starts_with("Format your ") || o == "Malformed command")
    }
}

/// Zips the parallel arrays and checks them against each other and the summary.
fn turns(record: &Recorded) -> Result<Vec<RecordedTurn<'_>>, String> {
    let history = &record.turn_history;
    let n = history.actions.len();
    if history.rewards.len() != n {
        return Err(format!("{n} actions and {} rewards", history.rewards.len()));
    }
    // The one inequality the harness itself writes: a withheld reply has no observation.
    let least = n - usize::from(history.actions.last().is_some_and(|a| a == "blocked"));
    let whole = |length: usize| length == n || length == least;
    if !whole(history.observations.len()) {
        return Err(format!(
            "{n} actions and {} observations",
            history.observations.len()
        ));
    }
    if let Some(valid) = history.valid_action.as_ref().filter(|v| !whole(v.len())) {
        return Err(format!(
            "{n} actions and {} entries of valid_action",
            valid.len()
        ));
    }
    if let Some(thoughts) = history.thoughts.as_ref().filter(|t| !whole(t.len())) {
        return Err(format!("{n} actions and {} thoughts", thoughts.len()));
    }
    if let Some(odd) = history.rewards.iter().find(|r| !r.is_finite()) {
        return Err(format!("reward {odd} is not a number"));
    }
    let best = history.rewards.iter().copied().fold(0.0, f64::max);
    if (best - record.summary.max_reward).abs() > 1e-9 {
        return Err(format!(
            "summary says max_reward {}, the turns say {best}",
            record.summary.max_reward
        ));
    }
    Ok((0..n)
        .map(|i| RecordedTurn {
            action: &history.actions[i],
            thought: history.thoughts.as_ref().and_then(|t| t.get(i)?.as_deref()),
            observation: history.observations.get(i).and_then(Option::as_deref),
            reward: history.rewards[i],
            valid: history.valid_action.as_ref().and_then(|v| *v.get(i)?),
        })
        .collect())
}

fn add_turn(episode: &mut Builder, dialect: &Dialect, index: usize, turn: &RecordedTurn<'_>) {
    let (code, fenced) = without_fence(turn.action);
    let (parse, parse_error) = if turn.blocked() {
        (
            ParseStatus::Error,
            Some("the reply was withheld".to_owned()),
        )
    } else if turn.refused() {
        (ParseStatus::Error, turn.observation.map(str::to_owned))
    } else if fenced {
        (
            ParseStatus::Repaired,
            Some("code fence taken off".to_owned()),
        )
    } else {
        (ParseStatus::Ok, None)
    };
    let runs = parse != ParseStatus::Error;
    let step = episode.step(Turn {
        raw_text: turn.action.to_owned(),
        reasoning: turn.thought.map(str::to_owned),
        parse,
        parse_error,
    });
    if !runs {
        episode.message(Some(step), Spoken::text("assistant", turn.action));
        if let Some(observation) = turn.observation {
            episode.message(Some(step), Spoken::text("user", observation));
        }
        return;
    }
    let id = format!("call_{index}");
    let mut arguments = Map::new();
    arguments.insert(dialect.argument.to_owned(), json!(code));
    let arguments = Value::Object(arguments).to_string();
    let call = ToolCall::new(id.as_str(), dialect.tool, arguments.as_str());
    let mut spoken = Spoken {
        content: None,
        tool_calls: Some(json!([call])),
        ..Spoken::text("assistant", "")
    };
    if let Some(thought) = turn.thought {
        spoken.content = Some(thought.to_owned());
    }
    episode.message(Some(step), spoken);
    let observation = turn.observation.unwrap_or_default();
    let failed = turn.valid == Some(false) || observation.starts_with("Error executing query");
    episode.call(Call {
        id: id.clone(),
        tool: dialect.tool.to_owned(),
        arguments,
        schema_error: None,
        outcome: match turn.observation {
            None => CallOutcome::OutcomeUnknown,
            Some(_) if failed => CallOutcome::Error,
            Some(_) => CallOutcome::Ok,
        },
        output: observation.to_owned(),
    });
    if turn.observation.is_some() {
        episode.message(
            Some(step),
            Spoken {
                name: Some(dialect.tool.to_owned()),
                tool_call_id: Some(id),
                ..Spoken::text("tool", observation)
            },
        );
    }
}

/// The code within a fence that encloses the whole action, and whether there was one.
fn without_fence(action: &str) -> (&str, bool) {
    let text = action.trim();
    let Some(inner) = text.strip_prefix("```").and_then(|t| t.strip_suffix("```")) else {
        return (action, false);
    };
    let word = inner
        .find(|c: char| !c.is_ascii_alphanumeric())
        .unwrap_or(0);
    let language = ["bash", "sh", "shell", "sql", "mysql", "python", "py"]
        .contains(&inner[..word].to_ascii_lowercase().as_str());
    let code = if language { &inner[word..] } else { inner };
    (code.trim(), true)
}

fn difficulty(hardness: &str) -> Option<i32> {
    match hardness {
        "easy" => Some(1),
        "medium" => Some(2),
        "hard" | "extra" => Some(3),
        _ => None,
    }
}

/// The model in `ic_ENV_STRATEGY_MODEL_N_turns….json`; else the folder's name.
fn policy_name(file: &Utf8Path) -> String {
    let stem = file.file_stem().unwrap_or_default();
    let model = stem
        .split_once("_turns")
        .and_then(|(head, _)| head.rsplit_once('_'))
        .and_then(|(head, _turns)| head.strip_prefix("ic_"))
        .and_then(|rest| rest.splitn(3, '_').nth(2));
    model
        .or_else(|| file.parent().and_then(Utf8Path::file_name))
        .unwrap_or(stem)
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_is_in_the_file_name() {
        for (file, policy) in [
            ("a/ic_sql_multiturn_gpt-4_10_turns.json", "gpt-4"),
            (
                "a/ic_bash_multiturn_chat-bison-001_10_turns_fs_1.json",
                "chat-bison-001",
            ),
            (
                "a/ic_sql_multiturn_text-davinci-003_10_turns.json",
                "text-davinci-003",
            ),
            ("starchat/results.json", "starchat"),
        ] {
            assert_eq!(policy_name(Utf8Path::new(file)), policy);
        }
    }

    #[test]
    fn fences_come_off_only_whole_ones() {
        assert_eq!(without_fence("```BASH\nls -l\n```"), ("ls -l", true));
        assert_eq!(without_fence("```SELECT 1```"), ("SELECT 1", true));
        assert_eq!(without_fence("```SQL SELECT 1```"), ("SELECT 1", true));
        assert_eq!(without_fence("```BASH ls"), ("```BASH ls", false));
        assert_eq!(without_fence("echo '```'"), ("echo '```'", false));
        assert_eq!(without_fence("``````"), ("", true));
    }
}
