-- id: resource_limit
-- title: A call hit a limit of memory, processes, disk or output
-- kind: qa
-- category: efficiency
-- severity: warn
-- version: 3
-- penalty: 0.15
-- fail_reason: resource
-- grain: call
-- reads: tool_calls
-- why: the approach does not fit the machine it is given. A call that met an injected fault, a merely slow one
--   apart, tells nothing of it; the reward component violation has the same rule.
SELECT
    episode_id,
    step_index,
    concat(tool, ' hit the limit of ', outcome) AS detail
FROM tool_calls
WHERE outcome IN ('memory', 'processes', 'disk', 'output_limit') AND coalesce(fault_injected, 'slow') = 'slow'
ORDER BY episode_id, step_index, call_index
