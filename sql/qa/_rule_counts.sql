-- id: rule_counts
-- title: What each rule hit, out of how many
-- kind: score
-- version: 1
-- grain: one row per rule that ran
-- reads: current_findings, episode_outcomes, rules, steps, tool_calls
-- why: a count without its denominator says nothing; the samples are where to look first
WITH totals AS (
    SELECT 'episode' AS grain, count(*) AS out_of FROM episode_outcomes
    UNION ALL
    SELECT 'step' AS grain, count(*) AS out_of FROM steps
    UNION ALL
    SELECT 'call' AS grain, count(*) AS out_of FROM tool_calls
),

hits AS (
    SELECT
        f.rule,
        count(*) AS findings,
        count(DISTINCT f.episode_id) AS episodes,
        count(DISTINCT CASE WHEN o.infrastructure THEN f.episode_id END) AS infrastructure,
        array_slice(array_agg(DISTINCT f.episode_id ORDER BY f.episode_id), 1, 5) AS samples
    FROM current_findings AS f
    INNER JOIN episode_outcomes AS o ON f.episode_id = o.episode_id
    GROUP BY f.rule
)

SELECT
    rules.id AS rule,
    rules.version AS rule_version,
    rules.title,
    rules.category,
    rules.severity,
    coalesce(hits.findings, 0) AS findings,
    coalesce(hits.episodes, 0) AS episodes,
    coalesce(hits.infrastructure, 0) AS infrastructure,
    rules.grain,
    totals.out_of,
    coalesce(hits.samples, make_array()) AS samples
FROM rules
INNER JOIN totals ON rules.grain = totals.grain
LEFT JOIN hits ON rules.id = hits.rule
ORDER BY rules.position
