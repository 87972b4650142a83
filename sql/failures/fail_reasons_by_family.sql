-- id: fail_reasons_by_family
-- title: Why episodes fail, by family
-- kind: failure
-- version: 1
-- grain: one row per policy, family and failure label
-- reads: episode_outcomes
-- why: the first table to read after a run. Shares are of the scored episodes; infrastructure stands beside, never in the rate.
WITH totals AS (
    SELECT
        policy,
        family,
        count(*) AS total,
        count(*) FILTER (WHERE NOT infrastructure) AS scored,
        count(*) FILTER (WHERE infrastructure) AS infrastructure
    FROM episode_outcomes
    GROUP BY policy, family
),

reasons AS (
    SELECT policy, family, fail_reason, count(*) AS episodes
    FROM episode_outcomes
    WHERE NOT infrastructure AND fail_reason IS NOT NULL
    GROUP BY policy, family, fail_reason
)

SELECT
    r.policy,
    r.family,
    r.fail_reason,
    r.episodes,
    round(CAST(r.episodes AS DOUBLE) / t.scored, 4) AS share,
    t.scored,
    t.infrastructure,
    t.total
FROM reasons AS r
INNER JOIN totals AS t ON r.policy = t.policy AND r.family = t.family
ORDER BY r.policy, r.family, r.episodes DESC, r.fail_reason
