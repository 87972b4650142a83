-- id: no_submit
-- title: The agent stopped without submitting
-- kind: qa
-- category: result
-- severity: warn
-- version: 1
-- penalty: 0.1
-- fail_reason: gave_up
-- grain: episode
-- reads: episode_outcomes
-- why: there is an explicit way to finish, and it was not used
SELECT
    episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    concat('stopped after ', n_steps, ' steps') AS detail
FROM episode_outcomes
WHERE end_reason = 'gave_up'
ORDER BY episode_id
