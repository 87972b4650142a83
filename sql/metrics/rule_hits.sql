-- id: rule_hits
-- title: What each rule hit in the newest QA, and how those episodes ended
-- kind: metric
-- version: 1
-- grain: one row per run and rule
-- reads: episode_outcomes, latest_findings
-- why: a rule that hits successes as often as failures judges style; one that hits failures only names a cause
WITH hits AS (
    SELECT DISTINCT run_id, episode_id, rule, category, severity
    FROM latest_findings
)

SELECT
    h.run_id,
    h.rule,
    h.category,
    h.severity,
    count(*) AS episodes,
    count(*) FILTER (WHERE o.success) AS successes,
    count(*) FILTER (WHERE NOT o.success) AS failures,
    count(*) FILTER (WHERE o.infrastructure) AS infrastructure,
    min(h.episode_id) AS sample
FROM hits AS h
INNER JOIN episode_outcomes AS o ON h.run_id = o.run_id AND h.episode_id = o.episode_id
GROUP BY h.run_id, h.rule, h.category, h.severity
ORDER BY h.run_id, episodes DESC, h.rule
