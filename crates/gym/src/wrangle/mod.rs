//! The task set `wrangle`: small files of delimiter-separated tables, one transformation each.
//!
//! A task names its files, columns and bounds; the delimiter can only be seen by looking at the file. Each family has one right
//! command and one systematic mistake that runs cleanly and, on the instance's data, always gives another result: the generator
//! puts the row that tells them apart into every file.
//!
//! - [`plan`]: the families and the parameters of an instance;
//! - `data`: the files, with the trap that the mistake falls into;
//! - `wording`: the instructions;
//! - `commands`: what the expert types, right and wrong;
//! - `verify`: the expected result, computed from set-up and parameters without any shell, and the comparison.

mod commands;
mod data;
pub(crate) mod plan;
mod verify;
mod wording;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drillyard_schema::task::SetupContent;
use drillyard_schema::{Milestone, SetupFile, Split, Task, TaskId};
use serde_json::json;

use crate::draw::{Draw, digest, digest_u64};
use crate::error::GymError;
use crate::task_set::{ExpertTurn, Family, TaskSet, Verification};

use plan::{FAMILIES, Op, Plan};

const NAME: &str = "wrangle";
const VERSION: &str = "2";
const TOOLS: &[&str] = &[
    "execute_shell",
    "read_file",
    "write_file",
    "list_dir",
    "submit",
];

/// See the [module](self).
#[derive(Debug, Clone, Copy)]
pub struct Wrangle;

impl TaskSet for Wrangle {
    fn name(&self) -> &'static str {
        NAME
    }

    fn version(&self) -> &'static str {
        VERSION
    }

    fn families(&self) -> &[Family] {
        &FAMILIES
    }

    fn generate(&self, split: Split, n: usize, seed: u64) -> Vec<Task> {
        let ops: Vec<Op> = Op::ALL
            .iter()
            .copied()
            .filter(|op| split == Split::HeldOut || !op.unseen())
            .collect();
        let mut seen = BTreeSet::new();
        let mut tasks = Vec::with_capacity(n);
        let mut index = 0_u64;
        while tasks.len() < n {
            let op = ops[tasks.len() % ops.len()];
            let task_seed =
                digest_u64(&[NAME, split.as_str(), &seed.to_string(), &index.to_string()]);
            index += 1;
            let (task, content) = instance(op, split, task_seed);
            if seen.insert(content) {
                tasks.push(task);
            }
        }
        tasks
    }

    fn asset(&self, name: &str) -> Result<Arc<[u8]>, GymError> {
        Err(GymError::UnknownAsset {
            set: NAME.to_owned(),
            name: name.to_owned(),
        })
    }

    fn outputs(&self, task: &Task) -> Vec<String> {
        Plan::of(task).map_or_else(|_| Vec::new(), |plan| vec![plan.output])
    }

    fn verify(
        &self,
        task: &Task,
        files: &BTreeMap<String, Vec<u8>>,
        _submitted: Option<&str>,
    ) -> Verification {
        match Plan::of(task) {
            Ok(plan) => verify::verify(task, &plan, files.get(&plan.output).map(Vec::as_slice)),
            Err(error) => Verification::fault(format!("verifier of {}: {error}", task.task_id)),
        }
    }

    fn expert(&self, task: &Task, seed: u64, mistake_rate: f64) -> Vec<ExpertTurn> {
        let Ok(plan) = Plan::of(task) else {
            return Vec::new();
        };
        let mut draw = Draw::new(&["expert", task.task_id.as_str(), &seed.to_string()]);
        let command = if draw.chance(mistake_rate) {
            commands::mistake(&plan)
        } else {
            commands::right(&plan)
        };
        let shell =
            |command: String| ExpertTurn::call("execute_shell", &json!({ "command": command }));
        vec![
            shell(commands::look(&plan)),
            shell(command),
            ExpertTurn::call("submit", &json!({})),
        ]
    }
}

/// The instance of a family for a seed, and the hash of its content.
///
/// The hash decides which split an instance may belong to, so splits share none by construction: the generator draws again until
/// it fits.
pub(crate) fn instance(op: Op, split: Split, seed: u64) -> (Task, [u8; 32]) {
    let mut draw = Draw::new(&[NAME, VERSION, op.name(), split.as_str(), &seed.to_string()]);
    loop {
        let (plan, files) = data::draw(op, split, &mut draw);
        let instruction = wording::instruction(&plan, &mut draw);
        let content = content_hash(&instruction, &files);
        if split_of(&content) == split {
            return (task(&plan, instruction, files, split, seed), content);
        }
    }
}

fn content_hash(instruction: &str, files: &[(String, String)]) -> [u8; 32] {
    let mut parts = vec!["instance", instruction];
    for (path, text) in files {
        parts.extend([path.as_str(), text.as_str()]);
    }
    digest(&parts)
}

fn split_of(content: &[u8; 32]) -> Split {
    match content[0] % 8 {
        0 => Split::Validation,
        1 => Split::HeldOut,
        _ => Split::Train,
    }
}

fn task(
    plan: &Plan,
    instruction: String,
    files: Vec<(String, String)>,
    split: Split,
    seed: u64,
) -> Task {
    let milestone = |name: &str, check| Milestone {
        name: name.to_owned(),
        check,
    };
    let inputs: Vec<&String> = files.iter().map(|(path, _)| path).collect();
    let milestones = vec![
        milestone("looked", json!({ "kind": "call_reads", "paths": inputs })),
        milestone("output_exists", json!({ "kind": "file_exists" })),
        milestone("output_parses", json!({ "kind": "file_parses" })),
        milestone("content_right", json!({ "kind": "content_right" })),
    ];
    Task {
        task_id: TaskId::derive(NAME, VERSION, plan.op.name(), seed),
        task_set: NAME.to_owned(),
        task_set_version: VERSION.to_owned(),
        family: plan.op.name().to_owned(),
        difficulty: plan.op.difficulty(),
        split,
        unseen_family: plan.op.unseen(),
        instruction,
        verifier: plan.to_value(),
        setup: files
            .into_iter()
            .map(|(path, text)| SetupFile {
                path,
                content: SetupContent::Text(text),
            })
            .collect(),
        milestones,
        tools: TOOLS.iter().map(|&tool| tool.to_owned()).collect(),
        source: "generated by Drillyard".to_owned(),
        licence: "Apache-2.0".to_owned(),
        seed: Some(seed),
    }
}

/// The text of `n` sample conversations of the train split, one string each: instruction, calls and observations, in the order a
/// model meets them, right and mistaken experts mixed. For building a tokenizer whose merges cover the structure of the task set.
pub fn structure_texts(n: usize, seed: u64) -> Vec<String> {
    Wrangle
        .generate(Split::Train, n, seed)
        .iter()
        .enumerate()
        .map(|(i, task)| {
            let turns = Wrangle.expert(task, i as u64, 0.5);
            let observations = [look_observation(task), "ok".to_owned(), String::new()];
            let mut text = task.instruction.clone();
            for (turn, observation) in turns.iter().zip(observations) {
                text.push('\n');
                text.push_str(&turn.text);
                if !observation.is_empty() {
                    text.push('\n');
                    text.push_str(&observation);
                }
            }
            text
        })
        .collect()
}

/// What `head -n 2` shows of the task's files.
fn look_observation(task: &Task) -> String {
    let heads: Vec<(&str, String)> = task
        .setup
        .iter()
        .filter_map(|file| match &file.content {
            SetupContent::Text(text) => Some((
                file.path.as_str(),
                text.lines().take(2).collect::<Vec<_>>().join("\n"),
            )),
            SetupContent::Asset(_) => None,
        })
        .collect();
    match heads.as_slice() {
        [(_, only)] => only.clone(),
        several => several
            .iter()
            .map(|(path, head)| format!("==> {path} <==\n{head}"))
            .collect::<Vec<_>>()
            .join("\n\n"),
    }
}

#[cfg(test)]
mod tests;
