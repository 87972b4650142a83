-- id: unknown_tool
-- title: A call of a tool that was not offered
-- kind: qa
-- category: format
-- severity: warn
-- version: 1
-- penalty: 0.15
-- grain: call
-- reads: tool_calls
-- why: the agent acts by habit from elsewhere rather than by the tools it was given
SELECT
    episode_id,
    step_index,
    concat('no tool ''', tool, '''') AS detail
FROM tool_calls
WHERE NOT schema_ok AND regexp_like(schema_error, '(unknown|no such|no) tool', 'i')
ORDER BY episode_id, step_index, call_index
