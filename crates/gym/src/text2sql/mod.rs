//! The task set `text2sql`: questions about the database of a coffee roastery, answered with one SELECT statement.
//!
//! Three grades: `one_table`, `joins`, `nested` (subqueries and windows). The agent finds the database as `data.db`, tries queries
//! with `execute_sql`, and hands in its statement as the answer of `submit`. The verifier runs that statement on a private copy of
//! the database and compares the rows with those of the reference, as a multiset, or in order where the question asks for one.
//! What the agent's own database holds by then does not matter.
//!
//! - `database`: the tables and their rows;
//! - `checker`: a guarded connection and the comparison of rows;
//! - `questions`: the questions, with reference and mistake, from `datasets/tasks/text2sql/questions.jsonl`.

mod checker;
mod database;
mod questions;

use std::collections::BTreeMap;
use std::sync::Arc;

use drillyard_schema::task::SetupContent;
use drillyard_schema::{Milestone, SetupFile, Split, Task, TaskId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::draw::{Draw, digest_u64};
use crate::error::GymError;
use crate::milestones::Check;
use crate::task_set::{ExpertTurn, Family, TaskSet, Verification};

use questions::Question;

const NAME: &str = "text2sql";
const VERSION: &str = "1";
const TOOLS: &[&str] = &["execute_sql", "submit"];
/// What the scripted expert asks first.
const LOOK: &str = "SELECT sql FROM sqlite_master";

const FAMILIES: [Family; 3] = [
    Family {
        name: "one_table",
        difficulty: 1,
        unseen: false,
    },
    Family {
        name: "joins",
        difficulty: 2,
        unseen: false,
    },
    Family {
        name: "nested",
        difficulty: 3,
        unseen: false,
    },
];

/// See the [module](self).
#[derive(Debug, Clone, Copy)]
pub struct Text2Sql;

/// What a task stores to be checked by.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    /// The reference query.
    sql: String,
    /// The expert's systematic mistake.
    mistake: String,
    /// The rows must come in the reference's order.
    ordered: bool,
}

impl TaskSet for Text2Sql {
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
        // A test reads every question, so an unreadable file never gets this far.
        let Ok(all) = questions::all() else {
            return Vec::new();
        };
        let mut by_family: Vec<Vec<&Question>> = FAMILIES
            .iter()
            .map(|family| {
                let mut own: Vec<&Question> = all
                    .iter()
                    .filter(|question| question.grade == family.name && question.split == split)
                    .collect();
                Draw::new(&[NAME, split.as_str(), family.name, &seed.to_string()])
                    .shuffle(&mut own);
                own.reverse();
                own
            })
            .collect();
        let mut tasks = Vec::new();
        while tasks.len() < n && by_family.iter().any(|own| !own.is_empty()) {
            for (family, own) in FAMILIES.iter().zip(&mut by_family) {
                if let Some(question) = own.pop() {
                    tasks.push(task(question, family));
                }
            }
        }
        tasks.truncate(n);
        tasks
    }

    fn asset(&self, name: &str) -> Result<Arc<[u8]>, GymError> {
        if name == database::ASSET {
            database::bytes().map_err(|reason| GymError::Database { reason })
        } else {
            Err(GymError::UnknownAsset {
                set: NAME.to_owned(),
                name: name.to_owned(),
            })
        }
    }

    fn outputs(&self, _task: &Task) -> Vec<String> {
        Vec::new()
    }

    fn verify(
        &self,
        task: &Task,
        _files: &BTreeMap<String, Vec<u8>>,
        submitted: Option<&str>,
    ) -> Verification {
        let plan = match Plan::deserialize(&task.verifier) {
            Ok(plan) => plan,
            Err(error) => {
                return Verification::fault(format!("verifier of {}: {error}", task.task_id));
            }
        };
        let compared = match checker::compare(&plan.sql, plan.ordered, submitted.unwrap_or("")) {
            Ok(compared) => compared,
            Err(reason) => return Verification::fault(format!("{}: {reason}", task.task_id)),
        };
        let milestones = task
            .milestones
            .iter()
            .filter(|milestone| match Check::deserialize(&milestone.check) {
                Ok(Check::AnswerRuns) => compared.runs,
                Ok(Check::ContentRight) => compared.success,
                _ => false,
            })
            .map(|milestone| milestone.name.clone())
            .collect();
        Verification {
            success: compared.success,
            score: compared.score,
            detail: compared.detail,
            milestones,
            fault: None,
        }
    }

    fn expert(&self, task: &Task, seed: u64, mistake_rate: f64) -> Vec<ExpertTurn> {
        let Ok(plan) = Plan::deserialize(&task.verifier) else {
            return Vec::new();
        };
        let mut draw = Draw::new(&["expert", task.task_id.as_str(), &seed.to_string()]);
        let sql = if draw.chance(mistake_rate) {
            plan.mistake
        } else {
            plan.sql
        };
        let query = |sql: &str| ExpertTurn::call("execute_sql", &json!({ "query": sql }));
        vec![
            query(LOOK),
            query(&sql),
            ExpertTurn::call("submit", &json!({ "answer": sql })),
        ]
    }
}

fn task(question: &Question, family: &Family) -> Task {
    // A question has no seed; its id stands in for one, so that task ids survive a new order of the file.
    let seed = digest_u64(&[NAME, &question.id]);
    let milestone = |name: &str, check: Value| Milestone {
        name: name.to_owned(),
        check,
    };
    let order = if question.ordered {
        " The order of the rows matters."
    } else {
        ""
    };
    Task {
        task_id: TaskId::derive(NAME, VERSION, family.name, seed),
        task_set: NAME.to_owned(),
        task_set_version: VERSION.to_owned(),
        family: family.name.to_owned(),
        difficulty: family.difficulty,
        split: question.split,
        unseen_family: family.unseen,
        instruction: format!("{}{order}", question.question),
        setup: vec![SetupFile {
            path: database::ASSET.to_owned(),
            content: SetupContent::Asset(database::ASSET.to_owned()),
        }],
        verifier: json!({
            "sql": question.sql,
            "mistake": question.mistake,
            "ordered": question.ordered,
        }),
        milestones: vec![
            milestone("queried", json!({ "kind": "call_queries" })),
            milestone("answer_runs", json!({ "kind": "answer_runs" })),
            milestone("content_right", json!({ "kind": "content_right" })),
        ],
        tools: TOOLS.iter().map(|&tool| tool.to_owned()).collect(),
        source: format!("written for Drillyard, {}", question.id),
        licence: "Apache-2.0".to_owned(),
        seed: None,
    }
}

#[cfg(test)]
mod tests;
