-- id: success_by_family
-- title: Success by policy, purpose and family, with its interval
-- kind: metric
-- version: 1
-- grain: one row per policy, purpose and family
-- reads: episode_outcomes
-- why: the figure everyone asks for, with what it is a share of. The interval is Wilson's at 95 %; episodes of one task are not
--   independent, so it is too narrow where few tasks were tried often.
WITH counted AS (
    SELECT
        policy,
        purpose,
        family,
        count(*) AS total,
        count(*) FILTER (WHERE infrastructure) AS infrastructure,
        CAST(count(success) AS DOUBLE) AS n,
        CAST(count(*) FILTER (WHERE success) AS DOUBLE) AS wins
    FROM episode_outcomes
    GROUP BY policy, purpose, family
),

rated AS (
    SELECT *, wins / nullif(n, 0) AS p, 3.8415 AS z2
    FROM counted
)

SELECT
    policy,
    purpose,
    family,
    total,
    CAST(n AS BIGINT) AS scored,
    infrastructure,
    CAST(wins AS BIGINT) AS successes,
    round(p, 4) AS success,
    round((p + z2 / (2 * n) - sqrt(z2 * (p * (1 - p) + z2 / (4 * n)) / n)) / (1 + z2 / n), 4) AS lo,
    round((p + z2 / (2 * n) + sqrt(z2 * (p * (1 - p) + z2 / (4 * n)) / n)) / (1 + z2 / n), 4) AS hi
FROM rated
ORDER BY policy, purpose, family
