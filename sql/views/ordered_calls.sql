-- id: ordered_calls
-- title: Tool calls numbered in the order they ran, with what they did
-- kind: view
-- version: 2
-- grain: one row per tool call
-- reads: tool_calls
-- why: rules about order need one number per call, and the same notion of failing, changing and looking. A call fails when the agent can
--   see that it did not work; a sandbox fault is nobody's failure. A look is a call that worked and changed nothing. A call that was lost,
--   or met an injected fault that changes more than how long it took, says nothing of the agent.
WITH numbered AS (
    SELECT
        *,
        row_number() OVER (
            PARTITION BY run_id, episode_id
            ORDER BY step_index, call_index
        ) AS call_number,
        coalesce(array_length(files_changed), 0) AS n_changes
    FROM tool_calls
)

SELECT
    run_id,
    episode_id,
    step_index,
    call_index,
    call_number,
    tool,
    arguments,
    call_hash,
    outcome,
    stdout,
    stderr,
    n_changes,
    tool = 'submit' AS is_submit,
    outcome NOT IN ('ok', 'sandbox_fault', 'outcome_unknown') AS failed,
    tool <> 'submit' AND outcome = 'ok' AND n_changes = 0 AS is_look,
    outcome IN ('sandbox_fault', 'outcome_unknown') OR coalesce(fault_injected, 'slow') <> 'slow' AS says_nothing
FROM numbered
