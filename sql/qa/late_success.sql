-- id: late_success
-- title: Success after a limit or after timeouts
-- kind: qa
-- category: result
-- severity: block
-- version: 1
-- penalty: 0.3
-- grain: episode
-- reads: episode_outcomes, ordered_calls
-- param: timeouts = 2
-- why: the result is right, and the way is not one to copy: a limit ended the episode before the agent said it was done, or calls ran
--   out of time on the way
WITH timed_out AS (
    SELECT episode_id, count(*) AS timeouts
    FROM ordered_calls
    WHERE outcome = 'timeout'
    GROUP BY episode_id
),

judged AS (
    SELECT
        o.episode_id,
        CASE
            WHEN o.end_reason IN ('step_limit', 'episode_timeout', 'context_limit', 'parse_limit')
                THEN concat('succeeded, ended by ', o.end_reason)
            WHEN t.timeouts >= $timeouts
                THEN concat('succeeded after ', t.timeouts, ' timeouts')
        END AS detail
    FROM episode_outcomes AS o
    LEFT JOIN timed_out AS t ON o.episode_id = t.episode_id
    WHERE o.success
)

SELECT
    episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    detail
FROM judged
WHERE detail IS NOT NULL
ORDER BY episode_id
