-- id: repaired_call
-- title: A call that was understood only after a repair
-- kind: qa
-- category: format
-- severity: warn
-- version: 1
-- penalty: 0.05
-- grain: step
-- reads: steps
-- why: another parser may not be as kind; practice on such turns teaches the damage along with the deed
SELECT
    episode_id,
    step_index,
    coalesce(parse_error, 'repaired') AS detail
FROM steps
WHERE parse_status = 'repaired'
ORDER BY episode_id, step_index
