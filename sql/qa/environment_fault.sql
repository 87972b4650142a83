-- id: environment_fault
-- title: The environment failed, not the agent
-- kind: qa
-- category: result
-- severity: block
-- version: 1
-- penalty: 0.5
-- fail_reason: environment
-- grain: episode
-- reads: episode_outcomes, tool_calls
-- why: such episodes say nothing of the policy: those that infrastructure ended are never scored, those that went on after a call was
--   lost must not pass for clean ones
WITH lost_calls AS (
    SELECT episode_id, min(step_index) AS step_index, min(outcome) AS outcome
    FROM tool_calls
    WHERE outcome IN ('sandbox_fault', 'outcome_unknown')
    GROUP BY episode_id
)

SELECT
    o.episode_id,
    l.step_index,
    CASE
        WHEN o.infrastructure THEN o.end_reason || coalesce(': ' || o.infrastructure_cause, '')
        ELSE concat('a call ended with ', l.outcome)
    END AS detail
FROM episode_outcomes AS o
LEFT JOIN lost_calls AS l ON o.episode_id = l.episode_id
WHERE o.infrastructure OR l.episode_id IS NOT NULL
ORDER BY o.episode_id
