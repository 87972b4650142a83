//! Milestones that only the calls show: "looked at the input before writing anything".

use drillyard_schema::Task;
use serde::Deserialize;
use serde_json::Value;

/// How a milestone is told.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Check {
    /// A call read one of the paths and wrote nothing.
    CallReads {
        /// Relative to the work directory.
        paths: Vec<String>,
    },
    /// A query was run.
    CallQueries,
    /// The output file exists and is not empty.
    FileExists,
    /// The output file has the shape that was asked for.
    FileParses,
    /// The content is right.
    ContentRight,
    /// The answer is a query that runs.
    AnswerRuns,
}

/// The milestone that a call reaches, if any: its name. Give every call that ran without error; a milestone counts once.
pub fn call_milestone(task: &Task, tool: &str, arguments: &Value) -> Option<String> {
    task.milestones
        .iter()
        .find(|milestone| match Check::deserialize(&milestone.check) {
            Ok(Check::CallReads { paths }) => reads(&paths, tool, arguments),
            Ok(Check::CallQueries) => tool == "execute_sql",
            _ => false,
        })
        .map(|milestone| milestone.name.clone())
}

fn reads(paths: &[String], tool: &str, arguments: &Value) -> bool {
    let argument = |name: &str| arguments.get(name).and_then(Value::as_str).unwrap_or("");
    match tool {
        "read_file" => {
            let path = argument("path");
            let path = path.strip_prefix("/work/").unwrap_or(path);
            paths.iter().any(|p| p == path.trim_start_matches("./"))
        }
        "execute_shell" => {
            let command = argument("command");
            let words: Vec<&str> = command
                .split(|c: char| c.is_whitespace() || "<>|;&'\"()".contains(c))
                .map(|word| word.strip_prefix("/work/").unwrap_or(word))
                .map(|word| word.trim_start_matches("./"))
                .collect();
            !command.contains('>')
                && !words.contains(&"tee")
                && paths.iter().any(|p| words.contains(&p.as_str()))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn looking_is_reading_without_writing() {
        let paths = ["kafo.csv".to_owned()];
        let shell = |command: &str| reads(&paths, "execute_shell", &json!({ "command": command }));
        assert!(shell("head -n 2 kafo.csv"));
        assert!(shell("cat ./kafo.csv | wc -l"));
        assert!(shell("wc -l <kafo.csv"));
        assert!(!shell("sort kafo.csv>mire.csv"));
        assert!(!shell("head -n 2 bukafo.csv"));
        assert!(!shell("ls"));
        assert!(reads(
            &paths,
            "read_file",
            &json!({ "path": "/work/kafo.csv" })
        ));
        assert!(!reads(
            &paths,
            "write_file",
            &json!({ "path": "kafo.csv", "content": "" })
        ));
    }
}
