//! The system prompts: one or two short sentences a task set.

/// What the model is told before the task. Sets without a prompt of their own get the general one.
pub fn system_prompt(set: &str) -> &'static str {
    match set {
        "wrangle" => "Do the task with the tools. Look at the files first. Submit when it is done.",
        "text2sql" => {
            "Answer the question about the SQLite database data.db with one SELECT statement. \
             Look at the schema and try your query with execute_sql, then submit the statement as the answer."
        }
        _ => "Do the task with the tools, one call a turn. Submit when it is done.",
    }
}
