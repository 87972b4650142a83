-- id: latest_scores
-- title: The scores of each run's newest successful QA
-- kind: view
-- version: 1
-- grain: one row per episode
-- reads: latest_runs, scores
-- why: QA that runs again appends; only its last word counts
SELECT scores.*
FROM scores
WHERE scores.stage_run IN (SELECT stage_run FROM latest_runs WHERE stage = 'qa')
