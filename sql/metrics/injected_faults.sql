-- id: injected_faults
-- title: Success with and without injected faults, by kind
-- kind: metric
-- version: 1
-- grain: one row per run, policy, purpose and kind of fault
-- reads: episode_outcomes, tool_calls
-- why: whether agents cope with slow tools, refusals and other people's changes. Only runs in which faults were injected are shown; none
--   are their episodes that met no fault, any those that met at least one, and an episode that met several kinds counts for each. The
--   intervals are Wilson's at 95 %, that of the difference to none is Newcombe's. Faults are drawn by call, so episodes with many calls
--   meet more of them, and those are often the harder ones: compare kinds with each other before blaming faults.
WITH met AS (
    SELECT DISTINCT run_id, episode_id, fault_injected AS fault
    FROM tool_calls
    WHERE fault_injected IS NOT NULL
),

with_runs AS (
    SELECT e.*
    FROM episode_outcomes AS e
    LEFT SEMI JOIN met ON e.run_id = met.run_id
),

labels AS (
    SELECT column1 AS label FROM (VALUES ('kind'), ('any'))
),

-- Each episode once for every kind it met and once for any, or once for none.
labelled AS (
    SELECT DISTINCT
        e.run_id,
        e.policy,
        e.purpose,
        e.episode_id,
        e.infrastructure,
        e.success,
        CASE
            WHEN met.fault IS NULL THEN 'none'
            WHEN labels.label = 'any' THEN 'any'
            ELSE met.fault
        END AS fault
    FROM with_runs AS e
    LEFT JOIN met ON e.run_id = met.run_id AND e.episode_id = met.episode_id
    CROSS JOIN labels
),

counted AS (
    SELECT
        run_id,
        policy,
        purpose,
        fault,
        count(*) AS total,
        count(*) FILTER (WHERE infrastructure) AS infrastructure,
        CAST(count(success) AS DOUBLE) AS n,
        CAST(count(*) FILTER (WHERE success) AS DOUBLE) AS wins
    FROM labelled
    GROUP BY run_id, policy, purpose, fault
),

rated AS (
    SELECT *, wins / nullif(n, 0) AS p, 3.8415 AS z2
    FROM counted
),

bounded AS (
    SELECT
        *,
        (p + z2 / (2 * n) - sqrt(z2 * (p * (1 - p) + z2 / (4 * n)) / n)) / (1 + z2 / n) AS lo,
        (p + z2 / (2 * n) + sqrt(z2 * (p * (1 - p) + z2 / (4 * n)) / n)) / (1 + z2 / n) AS hi
    FROM rated
),

without AS (
    SELECT run_id, policy, purpose, p AS p0, lo AS lo0, hi AS hi0
    FROM bounded
    WHERE fault = 'none'
)

SELECT
    b.run_id,
    b.policy,
    b.purpose,
    b.fault,
    b.total,
    CAST(b.n AS BIGINT) AS scored,
    b.infrastructure,
    CAST(b.wins AS BIGINT) AS successes,
    round(b.p, 4) AS success,
    round(b.lo, 4) AS lo,
    round(b.hi, 4) AS hi,
    CASE WHEN b.fault <> 'none' THEN round(b.p - w.p0, 4) END AS difference,
    CASE
        WHEN b.fault <> 'none'
            THEN round(b.p - w.p0 - sqrt(power(b.p - b.lo, 2) + power(w.hi0 - w.p0, 2)), 4)
    END AS difference_lo,
    CASE
        WHEN b.fault <> 'none'
            THEN round(b.p - w.p0 + sqrt(power(b.hi - b.p, 2) + power(w.p0 - w.lo0, 2)), 4)
    END AS difference_hi
FROM bounded AS b
LEFT JOIN without AS w ON b.run_id = w.run_id AND b.policy = w.policy AND b.purpose = w.purpose
ORDER BY
    b.run_id,
    b.policy,
    b.purpose,
    CASE b.fault WHEN 'none' THEN 0 WHEN 'any' THEN 1 ELSE 2 END,
    b.fault
