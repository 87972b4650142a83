-- id: schema_violation
-- title: Arguments that do not fit the tool's schema
-- kind: qa
-- category: format
-- severity: warn
-- version: 1
-- penalty: 0.1
-- grain: call
-- reads: tool_calls
-- why: the call never ran. Calls of tools that do not exist are another rule's.
SELECT
    episode_id,
    step_index,
    concat(tool, ': ', coalesce(schema_error, 'arguments do not fit')) AS detail
FROM tool_calls
WHERE NOT schema_ok AND NOT regexp_like(coalesce(schema_error, ''), '(unknown|no such|no) tool', 'i')
ORDER BY episode_id, step_index, call_index
