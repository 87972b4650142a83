-- id: parse_failures
-- title: How often turns cannot be parsed, by policy
-- kind: failure
-- version: 1
-- grain: one row per policy
-- reads: episode_outcomes, steps
-- why: unparsable turns are lost turns; cut ones ask for more tokens, the rest for practice or another template
SELECT
    o.policy,
    count(*) AS turns,
    count(*) FILTER (WHERE s.parse_status = 'error') AS errors,
    count(*) FILTER (WHERE s.parse_status = 'repaired') AS repaired,
    count(*) FILTER (WHERE s.finish_reason = 'length') AS cut,
    round(CAST(count(*) FILTER (WHERE s.parse_status = 'error') AS DOUBLE) / count(*), 4) AS error_rate,
    count(DISTINCT CASE WHEN s.parse_status = 'error' THEN s.episode_id END) AS episodes
FROM steps AS s
INNER JOIN episode_outcomes AS o ON s.episode_id = o.episode_id
GROUP BY o.policy
ORDER BY error_rate DESC, o.policy
