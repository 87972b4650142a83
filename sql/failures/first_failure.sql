-- id: first_failure
-- title: At which step the first call fails, and whether the agent recovers
-- kind: failure
-- version: 1
-- grain: one row per policy and step of the first failed call
-- reads: episode_outcomes, ordered_calls
-- why: early failures point at the prompt and the tools, late ones at planning; the recovery rate tells whether errors are read
WITH first AS (
    SELECT episode_id, min(step_index) AS step_index
    FROM ordered_calls
    WHERE failed
    GROUP BY episode_id
)

SELECT
    o.policy,
    first.step_index,
    count(*) AS episodes,
    count(*) FILTER (WHERE o.success) AS succeeded,
    round(CAST(count(*) FILTER (WHERE o.success) AS DOUBLE) / nullif(count(o.success), 0), 4) AS recovery_rate
FROM first
INNER JOIN episode_outcomes AS o ON first.episode_id = o.episode_id
WHERE NOT o.infrastructure
GROUP BY o.policy, first.step_index
ORDER BY o.policy, first.step_index
