-- id: verifier_disagreement
-- title: Verdicts on one episode contradict each other
-- kind: qa
-- category: result
-- severity: block
-- version: 1
-- penalty: 0.5
-- grain: episode
-- reads: verdicts
-- why: one of them is wrong, and nobody knows which: neither a success to copy nor a failure to avoid
WITH sides AS (
    SELECT
        episode_id,
        string_agg(DISTINCT kind, ', ' ORDER BY kind) FILTER (WHERE success) AS for_it,
        string_agg(DISTINCT kind, ', ' ORDER BY kind) FILTER (WHERE NOT success) AS against_it
    FROM verdicts
    GROUP BY episode_id
)

SELECT
    episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    concat('success says ', for_it, '; failure says ', against_it) AS detail
FROM sides
WHERE for_it IS NOT NULL AND against_it IS NOT NULL
ORDER BY episode_id
