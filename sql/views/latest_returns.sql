-- id: latest_returns
-- title: The returns of each run's newest successful credit
-- kind: view
-- version: 1
-- grain: one row per episode and step
-- reads: latest_runs, returns
-- why: credit that runs again appends; only its last word counts
SELECT returns.*
FROM returns
WHERE returns.stage_run IN (SELECT stage_run FROM latest_runs WHERE stage = 'credit')
