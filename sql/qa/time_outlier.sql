-- id: time_outlier
-- title: Far more tool time than the task usually takes
-- kind: qa
-- category: efficiency
-- severity: warn
-- version: 1
-- penalty: 0.1
-- grain: episode
-- reads: episode_outcomes
-- param: factor = 4.0
-- param: attempts = 4
-- param: excess_s = 2.0
-- why: measured against the task's own attempts. Tool time, since the model's depends on who else was being served.
WITH usual AS (
    SELECT task_id, median(tool_us / 1000000.0) AS seconds
    FROM episode_outcomes
    WHERE NOT infrastructure
    GROUP BY task_id
    HAVING count(*) >= $attempts
),

timed AS (
    SELECT episode_id, task_id, infrastructure, tool_us / 1000000.0 AS seconds
    FROM episode_outcomes
)

SELECT
    t.episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    concat(round(t.seconds, 1), ' s in tools where ', round(u.seconds, 1), ' s are usual') AS detail
FROM timed AS t
INNER JOIN usual AS u ON t.task_id = u.task_id
WHERE NOT t.infrastructure AND t.seconds > u.seconds * $factor AND t.seconds > u.seconds + $excess_s
ORDER BY t.episode_id
