-- id: lost_state
-- title: Resumed from a state that could not be restored whole
-- kind: qa
-- category: result
-- severity: warn
-- version: 1
-- penalty: 0.2
-- grain: episode
-- reads: episode_outcomes
-- why: the program died, and some changed file was too large to be logged: later steps may have met another state than the record tells
SELECT
    episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    concat(n_state_lost, ' calls could not be restored') AS detail
FROM episode_outcomes
WHERE n_state_lost > 0
ORDER BY episode_id
