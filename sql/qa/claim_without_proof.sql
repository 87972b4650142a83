-- id: claim_without_proof
-- title: Claimed success without a look at the result
-- kind: qa
-- category: result
-- severity: warn
-- version: 1
-- penalty: 0.05
-- grain: episode
-- reads: episode_outcomes, ordered_calls
-- why: right this time, by trust rather than by check. Claims that turned out false are another rule's.
WITH last_change AS (
    SELECT episode_id, max(call_number) AS call_number
    FROM ordered_calls
    WHERE n_changes > 0
    GROUP BY episode_id
),

checks AS (
    SELECT DISTINCT c.episode_id
    FROM ordered_calls AS c
    INNER JOIN last_change AS l ON c.episode_id = l.episode_id AND c.call_number > l.call_number
    WHERE c.is_look
)

SELECT
    o.episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    concat('claimed success; nothing was looked at after call ', l.call_number) AS detail
FROM episode_outcomes AS o
INNER JOIN last_change AS l ON o.episode_id = l.episode_id
LEFT ANTI JOIN checks ON o.episode_id = checks.episode_id
WHERE
    NOT o.infrastructure
    AND o.claimed_success
    AND o.success IS DISTINCT FROM false
ORDER BY o.episode_id
