-- id: gains
-- title: What each trained policy gains over its base on held-out tasks, the smallest gain first
-- kind: metric
-- version: 1
-- grain: one row per evaluation of a policy beside its base
-- reads: evals
-- why: one training says little about a method: several seeds do, and the worst of them; a control that gains as well says that the gain
--   is not learned from outcomes. Points are percentage points over the same tasks, with their paired 95 % interval.
WITH held_out AS (
    SELECT
        stage_run,
        policy,
        policy_revision,
        metric,
        value,
        lo,
        hi,
        n
    FROM evals
    WHERE split = 'held_out' AND family IS NULL
)

SELECT
    d.policy,
    left(d.policy_revision, 12) AS revision,
    round(b.value * 100, 1) AS base_percent,
    round(s.value * 100, 1) AS percent,
    round(d.value * 100, 1) AS gain,
    round(d.lo * 100, 1) AS gain_lo,
    round(d.hi * 100, 1) AS gain_hi,
    s.n
FROM held_out AS d
INNER JOIN held_out AS s ON d.stage_run = s.stage_run AND d.policy = s.policy
INNER JOIN held_out AS b ON d.stage_run = b.stage_run
WHERE d.metric = 'difference' AND s.metric = 'success' AND b.metric = 'success' AND b.policy = 'base'
ORDER BY d.policy, gain
