-- id: step_outlier
-- title: Far more steps than the task usually takes
-- kind: qa
-- category: efficiency
-- severity: warn
-- version: 1
-- penalty: 0.1
-- grain: episode
-- reads: episode_outcomes
-- param: factor = 2.0
-- param: attempts = 4
-- param: excess = 3
-- why: measured against the task's own attempts, so that long tasks are not punished for being long
WITH usual AS (
    SELECT task_id, median(CAST(n_steps AS DOUBLE)) AS steps
    FROM episode_outcomes
    WHERE NOT infrastructure
    GROUP BY task_id
    HAVING count(*) >= $attempts
)

SELECT
    o.episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    concat(o.n_steps, ' steps where ', u.steps, ' are usual') AS detail
FROM episode_outcomes AS o
INNER JOIN usual AS u ON o.task_id = u.task_id
WHERE NOT o.infrastructure AND o.n_steps > u.steps * $factor AND o.n_steps >= u.steps + $excess
ORDER BY o.episode_id
