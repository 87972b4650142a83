-- id: latency
-- title: How long the model and each tool take
-- kind: metric
-- version: 1
-- grain: one row per policy and source of time
-- reads: episode_outcomes, steps, tool_calls
-- why: where a rollout's time goes; milliseconds. Generation is measured from request to the whole reply, so it includes waiting.
WITH times AS (
    SELECT o.policy, '(model)' AS source, s.generation_us / 1000.0 AS ms
    FROM steps AS s
    INNER JOIN episode_outcomes AS o ON s.episode_id = o.episode_id
    UNION ALL
    SELECT o.policy, c.tool AS source, c.wall_us / 1000.0 AS ms
    FROM tool_calls AS c
    INNER JOIN episode_outcomes AS o ON c.episode_id = o.episode_id
)

SELECT
    policy,
    source,
    count(*) AS n,
    round(avg(ms), 2) AS mean_ms,
    round(median(ms), 2) AS p50_ms,
    round(percentile_cont(ms, 0.95), 2) AS p95_ms,
    round(max(ms), 2) AS max_ms,
    round(sum(ms) / 1000.0, 2) AS total_s
FROM times
GROUP BY policy, source
ORDER BY policy, total_s DESC, source
