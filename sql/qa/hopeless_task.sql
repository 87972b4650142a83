-- id: hopeless_task
-- title: No attempt at the task succeeded
-- kind: qa
-- category: result
-- severity: warn
-- version: 1
-- penalty: 0.05
-- grain: episode
-- reads: episode_outcomes
-- param: attempts = 8
-- why: too hard for this policy, or the task or its verifier is wrong; either way the group teaches nothing by comparison
WITH tasks AS (
    SELECT task_id, policy, count(*) AS attempts
    FROM episode_outcomes
    WHERE success IS NOT NULL
    GROUP BY task_id, policy
    HAVING count(*) >= $attempts AND NOT bool_or(success)
)

SELECT
    o.episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    concat('0 of ', tasks.attempts, ' attempts at ', o.task_id, ' succeeded') AS detail
FROM episode_outcomes AS o
INNER JOIN tasks ON o.task_id = tasks.task_id AND o.policy = tasks.policy
WHERE o.success IS NOT NULL
ORDER BY o.episode_id
