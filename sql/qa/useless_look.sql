-- id: useless_look
-- title: Looked again at what had not changed
-- kind: qa
-- category: efficiency
-- severity: warn
-- version: 2
-- penalty: 0.05
-- grain: call
-- reads: ordered_calls
-- why: the same look with nothing changed in between cannot tell anything new. A call whose outcome was lost may have changed something.
WITH looks AS (
    SELECT
        *,
        sum(CASE WHEN n_changes > 0 OR says_nothing THEN 1 ELSE 0 END) OVER (
            PARTITION BY episode_id
            ORDER BY call_number
        ) AS changes_so_far
    FROM ordered_calls
),

numbered AS (
    SELECT
        *,
        row_number() OVER (
            PARTITION BY episode_id, call_hash, changes_so_far
            ORDER BY call_number
        ) AS nth
    FROM looks
    WHERE is_look AND NOT says_nothing
)

SELECT
    episode_id,
    step_index,
    concat(tool, ': the same look, number ', nth) AS detail
FROM numbered
WHERE nth > 1
ORDER BY episode_id, call_number
