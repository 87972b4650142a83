-- id: error_ignored
-- title: The last call failed and the agent stopped there
-- kind: qa
-- category: logic
-- severity: warn
-- version: 1
-- penalty: 0.3
-- fail_reason: tool_error
-- grain: episode
-- reads: episode_outcomes, ordered_calls
-- why: an error was on the screen and was not dealt with. Ends that the agent did not choose (limits, timeouts) are left out.
WITH last_calls AS (
    SELECT
        *,
        row_number() OVER (PARTITION BY episode_id ORDER BY call_number DESC) AS from_end
    FROM ordered_calls
    WHERE NOT is_submit
)

SELECT
    l.episode_id,
    l.step_index,
    concat(l.tool, ' ended with ', l.outcome, ', then the agent stopped') AS detail
FROM last_calls AS l
INNER JOIN episode_outcomes AS o ON l.episode_id = o.episode_id
WHERE l.from_end = 1 AND l.failed AND o.end_reason IN ('submitted', 'gave_up', 'other')
ORDER BY l.episode_id
