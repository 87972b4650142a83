-- id: latest_advantages
-- title: The advantages of each run's newest successful credit
-- kind: view
-- version: 1
-- grain: one row per scored or unscored episode
-- reads: advantages, latest_runs
-- why: credit that runs again appends; only its last word counts
SELECT advantages.*
FROM advantages
WHERE advantages.stage_run IN (SELECT stage_run FROM latest_runs WHERE stage = 'credit')
