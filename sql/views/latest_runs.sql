-- id: latest_runs
-- title: The newest successful execution of each stage of each run
-- kind: view
-- version: 1
-- grain: one row per run and stage
-- reads: runs
-- why: a stage that runs again stamps a new stage_run; readers want the last one that worked
SELECT
    run_id,
    stage,
    first_value(stage_run ORDER BY started_at DESC, ended_at DESC, stage_run DESC) AS stage_run,
    first_value(fingerprint ORDER BY started_at DESC, ended_at DESC, stage_run DESC) AS fingerprint,
    max(started_at) AS started_at
FROM runs
WHERE status = 'succeeded'
GROUP BY run_id, stage
