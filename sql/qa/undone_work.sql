-- id: undone_work
-- title: A change was taken back
-- kind: qa
-- category: logic
-- severity: warn
-- version: 1
-- penalty: 0.15
-- fail_reason: logic_break
-- grain: call
-- reads: file_changes
-- why: steps that contradict each other: a file went back to what it had been before an earlier call, or what the episode made was
--   deleted again. Clean-up of files under a name that says temporary is not counted.
WITH history AS (
    SELECT *
    FROM file_changes
    WHERE NOT regexp_like(path, '(^|/)(tmp|temp|\.)|\.(tmp|bak|swp)$|~$', 'i')
)

SELECT
    later.episode_id,
    later.step_index,
    concat(later.path, ' is again as before step ', min(earlier.step_index)) AS detail
FROM history AS later
INNER JOIN history AS earlier
    ON
        later.episode_id = earlier.episode_id
        AND later.path = earlier.path
        AND earlier.call_number < later.call_number
        AND later.after_hash IS NOT DISTINCT FROM earlier.before_hash
GROUP BY later.episode_id, later.step_index, later.call_number, later.path
ORDER BY later.episode_id, later.call_number, later.path
