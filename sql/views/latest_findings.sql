-- id: latest_findings
-- title: The findings of each run's newest successful QA
-- kind: view
-- version: 1
-- grain: one row per finding
-- reads: findings, latest_runs
-- why: QA that runs again appends; only its last word counts
SELECT findings.*
FROM findings
WHERE findings.stage_run IN (SELECT stage_run FROM latest_runs WHERE stage = 'qa')
