-- id: ambiguous_task
-- title: The same actions on the same task once succeeded and once failed
-- kind: qa
-- category: result
-- severity: block
-- version: 1
-- penalty: 0.5
-- grain: episode
-- reads: episode_outcomes, ordered_calls
-- why: the verdict depends on something other than what was done (time, chance, a leak between episodes): the comparison within
--   the group would teach noise
WITH actions AS (
    SELECT episode_id, string_agg(call_hash, ' ' ORDER BY call_number) AS actions
    FROM ordered_calls
    GROUP BY episode_id
),

attempts AS (
    SELECT o.episode_id, o.task_id, o.success, a.actions
    FROM episode_outcomes AS o
    INNER JOIN actions AS a ON o.episode_id = a.episode_id
    WHERE o.success IS NOT NULL
),

disputed AS (
    SELECT
        task_id,
        actions,
        count(*) AS attempts,
        count(*) FILTER (WHERE success) AS successes
    FROM attempts
    GROUP BY task_id, actions
    HAVING bool_or(success) AND bool_or(NOT success)
)

SELECT
    a.episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    concat('equal actions succeeded ', d.successes, ' times of ', d.attempts) AS detail
FROM attempts AS a
INNER JOIN disputed AS d ON a.task_id = d.task_id AND a.actions = d.actions
ORDER BY a.episode_id
