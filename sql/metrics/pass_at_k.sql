-- id: pass_at_k
-- title: Chance that at least one of k attempts succeeds
-- kind: metric
-- version: 1
-- grain: one row per policy, purpose and k
-- reads: episode_outcomes
-- why: what the policy can do at its best, and so what there is to learn. The unbiased estimate: over tasks with n attempts of which c
--   succeeded, the mean of 1 − C(n−c, k) / C(n, k); tasks with fewer than k attempts are left out.
WITH tasks AS (
    SELECT
        policy,
        purpose,
        task_id,
        count(*) AS n,
        count(*) FILTER (WHERE success) AS c
    FROM episode_outcomes
    WHERE success IS NOT NULL
    GROUP BY policy, purpose, task_id
),

sizes AS (
    SELECT column1 AS k FROM (VALUES (1), (2), (4), (8))
),

draws AS (
    SELECT tasks.*, sizes.k, unnest(range(0, sizes.k)) AS i
    FROM tasks
    INNER JOIN sizes ON tasks.n >= sizes.k
),

missed AS (
    SELECT
        policy,
        purpose,
        task_id,
        k,
        CASE
            WHEN min(n - c - i) <= 0 THEN 0.0
            ELSE exp(sum(ln(greatest(CAST(n - c - i AS DOUBLE), 1e-9) / (n - i))))
        END AS all_missed
    FROM draws
    GROUP BY policy, purpose, task_id, k
)

SELECT
    policy,
    purpose,
    k,
    count(*) AS tasks,
    round(avg(1.0 - all_missed), 4) AS pass_at_k
FROM missed
GROUP BY policy, purpose, k
ORDER BY policy, purpose, k
