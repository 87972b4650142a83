-- id: difficulty_bands
-- title: How hard the tasks are for each policy, by family
-- kind: metric
-- version: 1
-- grain: one row per policy, family and band
-- reads: episode_outcomes
-- param: low = 0.3
-- param: high = 0.7
-- why: comparison within a group teaches most where 30 to 70 % of the attempts succeed; those bands are marked. Tasks that always or
--   never succeed teach nothing by comparison.
WITH tasks AS (
    SELECT
        policy,
        family,
        task_id,
        count(*) AS attempts,
        avg(CASE WHEN success THEN 1.0 ELSE 0.0 END) AS success
    FROM episode_outcomes
    WHERE success IS NOT NULL
    GROUP BY policy, family, task_id
),

banded AS (
    SELECT
        *,
        CASE
            WHEN success = 0 THEN '1 never'
            WHEN success < $low THEN '2 hard'
            WHEN success <= $high THEN '3 useful'
            WHEN success < 1 THEN '4 easy'
            ELSE '5 always'
        END AS band
    FROM tasks
)

SELECT
    policy,
    family,
    band,
    CASE WHEN band = '3 useful' THEN '*' ELSE '' END AS mark,
    count(*) AS tasks,
    sum(attempts) AS attempts,
    round(avg(success), 4) AS success
FROM banded
GROUP BY policy, family, band
ORDER BY policy, family, band
