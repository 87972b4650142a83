-- id: group_sizes
-- title: Groups, and how many of their episodes count
-- kind: metric
-- version: 1
-- grain: one row per run, policy and purpose
-- reads: episode_outcomes
-- why: a baseline is only as good as the group behind it. Mixed groups have successes and failures; only those teach by comparison.
WITH groups AS (
    SELECT
        run_id,
        policy,
        purpose,
        group_id,
        count(*) AS total,
        count(*) FILTER (WHERE infrastructure) AS infrastructure,
        count(*) FILTER (WHERE NOT infrastructure) AS scored,
        coalesce(bool_or(success) AND bool_or(NOT success), false) AS mixed
    FROM episode_outcomes
    GROUP BY run_id, policy, purpose, group_id
)

SELECT
    run_id,
    policy,
    purpose,
    count(*) AS groups,
    sum(total) AS total,
    sum(scored) AS scored,
    sum(infrastructure) AS infrastructure,
    min(scored) AS smallest,
    max(scored) AS largest,
    count(*) FILTER (WHERE mixed) AS mixed,
    round(CAST(count(*) FILTER (WHERE mixed) AS DOUBLE) / count(*), 4) AS mixed_share
FROM groups
GROUP BY run_id, policy, purpose
ORDER BY run_id, policy, purpose
