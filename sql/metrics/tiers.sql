-- id: tiers
-- title: The pools of episodes, with quality and weight
-- kind: metric
-- version: 1
-- grain: one row per run, policy and tier
-- reads: episode_outcomes
-- why: what training will draw from; a null tier is infrastructure, or episodes that QA has not seen yet
SELECT
    run_id,
    policy,
    tier,
    count(*) AS episodes,
    round(avg(quality), 4) AS mean_quality,
    round(avg(weight), 4) AS mean_weight,
    round(sum(weight), 2) AS total_weight
FROM episode_outcomes
GROUP BY run_id, policy, tier
ORDER BY run_id, policy, tier NULLS LAST
