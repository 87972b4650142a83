//! The tools an agent is offered: their descriptions and JSON Schemas, the check of arguments, and what a call means for the
//! sandbox.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use drillyard_sandbox::Call;
use drillyard_schema::ToolSpec;
use serde_json::{Value, json};

use crate::error::GymError;

/// The version of the tools. A change of names, descriptions, schemas or meaning raises it.
pub const TOOLSET_VERSION: &str = "1";
/// The database that `execute_sql` opens where the call names none, relative to the work directory.
pub const DEFAULT_DATABASE: &str = "data.db";
/// The longest clock that `execute_shell` lets a call ask for; the sandbox's own limit holds as well.
pub const MAX_TIMEOUT_S: u64 = 600;
/// The most that `read_file` gives back, in bytes.
pub const MAX_READ_BYTES: u64 = 256 * 1024;

/// The name of each tool, in the order they are offered.
pub const TOOL_NAMES: &[&str] = &[
    "execute_shell",
    "read_file",
    "write_file",
    "list_dir",
    "execute_sql",
    "submit",
];

/// What a checked call asks for.
#[derive(Debug, Clone)]
pub enum ToolAction {
    /// Something to do in the sandbox.
    Sandbox(Call),
    /// The episode ends here.
    Submit {
        /// The answer, in tasks that ask for one.
        answer: Option<String>,
    },
}

/// The tools of an episode. Clones are cheap.
#[derive(Clone)]
pub struct Toolset {
    /// The version of the tools.
    pub version: &'static str,
    /// What the model is shown.
    pub specs: Arc<[ToolSpec]>,
    /// A hash over version and specs: 16 hexadecimal digits. Equal hashes mean the same tools.
    pub hash: String,
    validators: Arc<[jsonschema::Validator]>,
}

impl fmt::Debug for Toolset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.specs.iter().map(|spec| spec.name.as_str()).collect();
        f.debug_struct("Toolset")
            .field("version", &self.version)
            .field("tools", &names)
            .field("hash", &self.hash)
            .finish_non_exhaustive()
    }
}

impl Toolset {
    /// The tools of these names, in the given order, each once.
    ///
    /// # Errors
    /// A name that is no tool.
    pub fn named<S: AsRef<str>>(names: &[S]) -> Result<Self, GymError> {
        let mut specs: Vec<ToolSpec> = Vec::with_capacity(names.len());
        for name in names {
            let name = name.as_ref();
            if specs.iter().all(|spec| spec.name != name) {
                specs.push(spec(name).ok_or_else(|| GymError::UnknownTool {
                    name: name.to_owned(),
                    known: TOOL_NAMES.join(", "),
                })?);
            }
        }
        let validators = specs
            .iter()
            .map(|spec| {
                jsonschema::validator_for(&spec.parameters).map_err(|error| GymError::ToolSchema {
                    name: spec.name.clone(),
                    reason: error.to_string(),
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let shown: Vec<Value> = specs.iter().map(ToolSpec::to_openai).collect();
        let shown = Value::from(shown).to_string();
        Ok(Self {
            version: TOOLSET_VERSION,
            hash: drillyard_schema::ids::derive_id(&["toolset", TOOLSET_VERSION, &shown], 16),
            specs: specs.into(),
            validators: validators.into(),
        })
    }

    /// All tools.
    ///
    /// # Errors
    /// None in practice: a test builds it.
    pub fn all() -> Result<Self, GymError> {
        Self::named(TOOL_NAMES)
    }

    /// Checks a call against the tool's schema.
    ///
    /// # Errors
    /// What is wrong and what the tool takes, in words for the model.
    pub fn check(&self, name: &str, arguments: &Value) -> Result<(), String> {
        let Some(at) = self.specs.iter().position(|spec| spec.name == name) else {
            let known: Vec<&str> = self.specs.iter().map(|spec| spec.name.as_str()).collect();
            return Err(format!(
                "no tool '{name}'; the tools are: {}",
                known.join(", ")
            ));
        };
        let errors: Vec<String> = self.validators[at]
            .iter_errors(arguments)
            .map(|error| {
                let place = error.instance_path().to_string();
                if place.is_empty() {
                    error.to_string()
                } else {
                    format!("{error} at {place}")
                }
            })
            .collect();
        if errors.is_empty() {
            Ok(())
        } else {
            let signature = signature(&self.specs[at]);
            Err(format!("{}; call it as {signature}", errors.join("; ")))
        }
    }

    /// Checks a call and says what it asks for.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn to_call(&self, name: &str, arguments: &Value) -> Result<ToolAction, String> {
        self.check(name, arguments)?;
        let text = |key: &str| arguments.get(key).and_then(Value::as_str);
        let owned = |key: &str| text(key).unwrap_or_default().to_owned();
        Ok(match name {
            "execute_shell" => ToolAction::Sandbox(Call::Shell {
                command: owned("command"),
                timeout: arguments
                    .get("timeout_s")
                    .and_then(Value::as_f64)
                    .map(Duration::from_secs_f64),
            }),
            "read_file" => ToolAction::Sandbox(Call::ReadFile {
                path: owned("path"),
                max_bytes: MAX_READ_BYTES,
            }),
            "write_file" => ToolAction::Sandbox(Call::WriteFile {
                path: owned("path"),
                content: owned("content").into_bytes(),
            }),
            "list_dir" => ToolAction::Sandbox(Call::ListDir {
                path: text("path").unwrap_or(".").to_owned(),
            }),
            "execute_sql" => ToolAction::Sandbox(Call::Exec {
                argv: vec![
                    "drillyard-sql-tool".to_owned(),
                    text("database").unwrap_or(DEFAULT_DATABASE).to_owned(),
                ],
                stdin: owned("query").into_bytes(),
                timeout: None,
            }),
            "submit" => ToolAction::Submit {
                answer: text("answer").map(str::to_owned),
            },
            other => return Err(format!("tool '{other}' does nothing here")),
        })
    }
}

/// `name(required,optional?)`: a tool in one short line.
pub fn signature(spec: &ToolSpec) -> String {
    let required: Vec<&str> = spec
        .parameters
        .get("required")
        .and_then(Value::as_array)
        .map(|names| names.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    let optional = spec
        .parameters
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(|properties| properties.keys())
        .filter(|name| !required.contains(&name.as_str()))
        .map(|name| format!("{name}?"));
    let parameters: Vec<String> = required
        .iter()
        .map(|&name| name.to_owned())
        .chain(optional)
        .collect();
    format!("{}({})", spec.name, parameters.join(","))
}

/// A tool by name.
fn spec(name: &str) -> Option<ToolSpec> {
    let path = json!({ "type": "string", "minLength": 1, "description": "Path of the file, relative to the work directory." });
    let (description, properties, required): (&str, Value, &[&str]) = match name {
        "execute_shell" => (
            "Run a shell command line in the work directory and get its output and exit code. Use it for everything \
             that coreutils, sed, awk and the like can do. The file system persists between calls, variables and `cd` do not. \
             There is no network and no terminal: commands that wait for input or run longer than the clock are killed.",
            json!({
                "command": { "type": "string", "minLength": 1, "description": "The command line, pipes and redirections included." },
                "timeout_s": { "type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S, "description": "Kill the command after this many seconds; the environment's own limit also holds." },
            }),
            &["command"],
        ),
        "read_file" => (
            "Get the content of a text file. Use execute_shell with head, tail or grep for a part of a long one.",
            json!({ "path": path }),
            &["path"],
        ),
        "write_file" => (
            "Write a text file, replacing what was there. Folders on the way are created.",
            json!({
                "path": path,
                "content": { "type": "string", "description": "The whole new content." },
            }),
            &["path", "content"],
        ),
        "list_dir" => (
            "List the files and folders in a folder, with sizes in bytes.",
            json!({ "path": { "type": "string", "minLength": 1, "description": "The folder, relative to the work directory; without it the work directory itself." } }),
            &[],
        ),
        "execute_sql" => (
            "Run one SQLite statement and get the rows as a table with a header. SELECT * FROM sqlite_master shows the tables \
             and their columns. An error comes back as text.",
            json!({
                "query": { "type": "string", "minLength": 1, "description": "One SQL statement in SQLite's dialect." },
                "database": { "type": "string", "minLength": 1, "description": "Path of the database file, relative to the work directory; data.db without it." },
            }),
            &["query"],
        ),
        "submit" => (
            "End the task. Call it once, when everything asked for is in place; nothing can be changed afterwards.",
            json!({ "answer": { "type": "string", "description": "The answer, if the task asks for one; otherwise leave it out." } }),
            &[],
        ),
        _ => return None,
    };
    let mut parameters = json!({ "type": "object", "properties": properties });
    if !required.is_empty() {
        parameters["required"] = json!(required);
    }
    parameters["additionalProperties"] = json!(false);
    Some(ToolSpec {
        name: name.to_owned(),
        description: description.to_owned(),
        parameters,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Toolset {
        Toolset::all().unwrap()
    }

    #[test]
    fn every_tool_and_parameter_is_described() {
        let tools = all();
        assert_eq!(tools.specs.len(), TOOL_NAMES.len());
        for spec in tools.specs.iter() {
            assert!(spec.description.len() > 40, "{}", spec.name);
            let properties = spec.parameters["properties"].as_object().unwrap();
            for (name, schema) in properties {
                assert!(schema["description"].is_string(), "{} {name}", spec.name);
            }
        }
    }

    #[test]
    fn signatures_are_compact() {
        let shown: Vec<String> = all().specs.iter().map(signature).collect();
        assert_eq!(
            shown,
            [
                "execute_shell(command,timeout_s?)",
                "read_file(path)",
                "write_file(path,content)",
                "list_dir(path?)",
                "execute_sql(query,database?)",
                "submit(answer?)",
            ]
        );
    }

    #[test]
    fn wrong_arguments_are_explained() {
        let tools = all();
        let says = |name: &str, arguments: Value| tools.check(name, &arguments).unwrap_err();
        let missing = says("execute_shell", json!({}));
        assert!(
            missing.contains("\"command\" is a required property"),
            "{missing}"
        );
        assert!(
            missing.ends_with("call it as execute_shell(command,timeout_s?)"),
            "{missing}"
        );
        let kind = says("read_file", json!({ "path": 3 }));
        assert!(
            kind.contains("is not of type \"string\" at /path"),
            "{kind}"
        );
        assert!(says("read_file", json!({ "path": "a", "x": 1 })).contains("'x'"));
        assert!(says("read_file", json!("kafo.csv")).contains("object"));
        assert!(says("run", json!({})).contains("no tool 'run'"));
        assert!(
            says("execute_shell", json!({ "command": "ls", "timeout_s": -1 }))
                .contains("/timeout_s")
        );
    }

    #[test]
    fn calls_are_translated() {
        let tools = all();
        let call = |name: &str, arguments: Value| tools.to_call(name, &arguments).unwrap();
        match call(
            "execute_shell",
            json!({ "command": "ls", "timeout_s": 1.5 }),
        ) {
            ToolAction::Sandbox(Call::Shell { command, timeout }) => {
                assert_eq!(command, "ls");
                assert_eq!(timeout, Some(Duration::from_millis(1500)));
            }
            other => panic!("{other:?}"),
        }
        match call("execute_sql", json!({ "query": "SELECT 1" })) {
            ToolAction::Sandbox(Call::Exec { argv, stdin, .. }) => {
                assert_eq!(argv, ["drillyard-sql-tool", "data.db"]);
                assert_eq!(stdin, b"SELECT 1");
            }
            other => panic!("{other:?}"),
        }
        match call("list_dir", json!({})) {
            ToolAction::Sandbox(Call::ListDir { path }) => assert_eq!(path, "."),
            other => panic!("{other:?}"),
        }
        match call("submit", json!({ "answer": "42" })) {
            ToolAction::Submit { answer } => assert_eq!(answer.as_deref(), Some("42")),
            other @ ToolAction::Sandbox(_) => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_hash_names_the_tools() {
        assert_eq!(all().hash, all().hash);
        let two = Toolset::named(&["execute_shell", "submit"]).unwrap();
        assert_ne!(all().hash, two.hash);
        assert_ne!(
            two.hash,
            Toolset::named(&["submit", "execute_shell"]).unwrap().hash
        );
        let error = Toolset::named(&["execute_shel"]).unwrap_err().to_string();
        assert!(
            error.contains("'execute_shel'") && error.contains("execute_shell"),
            "{error}"
        );
    }
}
