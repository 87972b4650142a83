-- id: latest_pairs
-- title: The pairs of each run's newest successful credit
-- kind: view
-- version: 1
-- grain: one row per pair
-- reads: latest_runs, pairs
-- why: credit that runs again appends; only its last word counts
SELECT pairs.*
FROM pairs
WHERE pairs.stage_run IN (SELECT stage_run FROM latest_runs WHERE stage = 'credit')
