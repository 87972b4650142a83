-- id: survivorship
-- title: Are the episodes that infrastructure ended longer than those that finished?
-- kind: failure
-- version: 1
-- grain: one row per policy
-- reads: episode_outcomes
-- why: short episodes survive faults more often. Where interrupted ones are longer, leaving them out makes the rest look shorter and
--   better than the policy is. Lengths of episodes that time or context ran out on are shown too, since dropping those is the same trap.
SELECT
    policy,
    count(*) AS total,
    count(*) FILTER (WHERE NOT infrastructure) AS finished,
    count(*) FILTER (WHERE infrastructure) AS infrastructure,
    round(avg(n_steps) FILTER (WHERE NOT infrastructure), 2) AS steps_finished,
    round(avg(n_steps) FILTER (WHERE infrastructure), 2) AS steps_infrastructure,
    round(avg(n_steps) FILTER (WHERE end_reason IN ('episode_timeout', 'context_limit', 'step_limit')), 2) AS steps_limited,
    round(avg(generated_tokens) FILTER (WHERE NOT infrastructure), 1) AS tokens_finished,
    round(avg(generated_tokens) FILTER (WHERE infrastructure), 1) AS tokens_infrastructure,
    round(
        avg(wall_us) FILTER (WHERE infrastructure) / nullif(avg(wall_us) FILTER (WHERE NOT infrastructure), 0),
        2
    ) AS wall_ratio
FROM episode_outcomes
GROUP BY policy
ORDER BY policy
