-- id: resource_limit
-- title: A call hit a limit of memory, processes, disk or output
-- kind: qa
-- category: efficiency
-- severity: warn
-- version: 1
-- penalty: 0.15
-- fail_reason: resource
-- grain: call
-- reads: tool_calls
-- why: the approach does not fit the machine it is given
SELECT
    episode_id,
    step_index,
    concat(tool, ' hit the limit of ', outcome) AS detail
FROM tool_calls
WHERE outcome IN ('memory', 'processes', 'disk', 'output_limit')
ORDER BY episode_id, step_index, call_index
