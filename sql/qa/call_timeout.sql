-- id: call_timeout
-- title: A call ran out of time
-- kind: qa
-- category: efficiency
-- severity: warn
-- version: 2
-- penalty: 0.15
-- fail_reason: timeout
-- grain: call
-- reads: tool_calls
-- why: mostly a command that waits for input or walks the whole disk. A call that met an injected fault, a merely slow one apart, tells
--   nothing of the agent.
SELECT
    episode_id,
    step_index,
    concat(tool, ' killed after ', round(wall_us / 1000000.0, 1), ' s') AS detail
FROM tool_calls
WHERE outcome = 'timeout' AND coalesce(fault_injected, 'slow') = 'slow'
ORDER BY episode_id, step_index, call_index
