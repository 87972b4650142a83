-- id: step_counts
-- title: Steps and calls per episode, by family and outcome
-- kind: metric
-- version: 1
-- grain: one row per policy, family and outcome
-- reads: episode_outcomes
-- why: detours show as successes that take long; early surrender as failures that are short
SELECT
    policy,
    family,
    success,
    count(*) AS episodes,
    round(avg(n_steps), 2) AS mean_steps,
    median(CAST(n_steps AS DOUBLE)) AS median_steps,
    max(n_steps) AS max_steps,
    round(avg(n_tool_calls), 2) AS mean_calls
FROM episode_outcomes
WHERE NOT infrastructure
GROUP BY policy, family, success
ORDER BY policy, family, success NULLS LAST
