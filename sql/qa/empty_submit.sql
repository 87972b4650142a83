-- id: empty_submit
-- title: Submitted without having done anything
-- kind: qa
-- category: logic
-- severity: block
-- version: 1
-- penalty: 0.5
-- fail_reason: gave_up
-- grain: episode
-- reads: episode_outcomes, ordered_calls
-- why: no other call worked before the submission; a success of this kind was luck or a task that asks for nothing
WITH work AS (
    SELECT episode_id, count(*) AS calls
    FROM ordered_calls
    WHERE NOT is_submit AND outcome = 'ok'
    GROUP BY episode_id
)

SELECT
    o.episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    'submitted, and no other call had worked' AS detail
FROM episode_outcomes AS o
LEFT ANTI JOIN work ON o.episode_id = work.episode_id
WHERE o.end_reason = 'submitted'
ORDER BY o.episode_id
