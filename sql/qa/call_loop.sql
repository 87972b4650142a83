-- id: call_loop
-- title: The same call with the same result again and again
-- kind: qa
-- category: logic
-- severity: warn
-- version: 2
-- penalty: 0.3
-- fail_reason: loop
-- grain: call
-- reads: ordered_calls
-- param: times = 3
-- why: an agent that repeats what did not help is stuck. Calls whose result differs (a poll that moves on) are no loop,
--   nor are those that say nothing of the agent (lost, or spoilt by an injected fault).
WITH repeats AS (
    SELECT
        episode_id,
        call_hash,
        min(tool) AS tool,
        count(*) AS times,
        max(step_index) AS step_index
    FROM ordered_calls
    WHERE NOT is_submit AND NOT says_nothing
    GROUP BY episode_id, call_hash, outcome, stdout, stderr
)

SELECT
    episode_id,
    step_index,
    concat(times, ' times the same call of ', tool) AS detail
FROM repeats
WHERE times >= $times
ORDER BY episode_id, step_index
