-- id: tool_failures
-- title: How often each tool fails, and how
-- kind: failure
-- version: 1
-- grain: one row per policy and tool
-- reads: episode_outcomes, ordered_calls
-- why: tells a tool that is hard to use from one that is broken. Calls lost to the sandbox are counted apart and are in no rate.
WITH calls AS (
    SELECT o.policy, c.tool, c.outcome, c.failed
    FROM ordered_calls AS c
    INNER JOIN episode_outcomes AS o ON c.episode_id = o.episode_id
)

SELECT
    policy,
    tool,
    count(*) AS calls,
    count(*) FILTER (WHERE failed) AS failed,
    round(
        CAST(count(*) FILTER (WHERE failed) AS DOUBLE)
        / nullif(count(*) FILTER (WHERE outcome NOT IN ('sandbox_fault', 'outcome_unknown')), 0),
        4
    ) AS failure_rate,
    count(*) FILTER (WHERE outcome = 'error') AS errors,
    count(*) FILTER (WHERE outcome = 'rejected') AS rejected,
    count(*) FILTER (WHERE outcome = 'timeout') AS timeouts,
    count(*) FILTER (WHERE outcome IN ('memory', 'processes', 'disk', 'output_limit', 'killed')) AS limits,
    count(*) FILTER (WHERE outcome IN ('sandbox_fault', 'outcome_unknown')) AS infrastructure
FROM calls
GROUP BY policy, tool
ORDER BY failed DESC, policy, tool
