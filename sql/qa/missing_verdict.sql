-- id: missing_verdict
-- title: An episode that nobody judged
-- kind: qa
-- category: result
-- severity: warn
-- version: 1
-- penalty: 0.2
-- grain: episode
-- reads: episode_outcomes
-- why: without a verdict there is no outcome reward; a judge's opinion is no verdict
SELECT
    episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    coalesce('the ' || verdict_kind || ' verdict could not decide', 'no verdict') AS detail
FROM episode_outcomes
WHERE NOT infrastructure AND success IS NULL
ORDER BY episode_id
