-- id: token_cost
-- title: Tokens per episode, and successes per thousand generated tokens
-- kind: metric
-- version: 1
-- grain: one row per policy and purpose
-- reads: episode_outcomes
-- why: two policies of equal success are not equal if one talks twice as much
SELECT
    policy,
    purpose,
    count(*) AS scored,
    round(avg(prompt_tokens), 1) AS mean_prompt_tokens,
    round(avg(generated_tokens), 1) AS mean_generated_tokens,
    sum(generated_tokens) AS generated_tokens,
    round(
        1000.0 * count(*) FILTER (WHERE success) / nullif(CAST(sum(generated_tokens) AS DOUBLE), 0),
        4
    ) AS success_per_1k_tokens
FROM episode_outcomes
WHERE NOT infrastructure
GROUP BY policy, purpose
ORDER BY policy, purpose
