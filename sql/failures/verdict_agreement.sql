-- id: verdict_agreement
-- title: How often two kinds of verdict agree
-- kind: failure
-- version: 1
-- grain: one row per pair of verdict kinds
-- reads: verdicts
-- why: a recorded reward that a re-run does not confirm, or a judge that sides with the agent, shows here before it shows in training
WITH decided AS (
    SELECT episode_id, kind, bool_and(success) AS success
    FROM verdicts
    WHERE success IS NOT NULL
    GROUP BY episode_id, kind
)

SELECT
    a.kind AS one,
    b.kind AS other,
    count(*) AS episodes,
    count(*) FILTER (WHERE a.success = b.success) AS agree,
    count(*) FILTER (WHERE a.success AND NOT b.success) AS only_one,
    count(*) FILTER (WHERE b.success AND NOT a.success) AS only_other,
    round(CAST(count(*) FILTER (WHERE a.success = b.success) AS DOUBLE) / count(*), 4) AS agreement
FROM decided AS a
INNER JOIN decided AS b ON a.episode_id = b.episode_id AND a.kind < b.kind
GROUP BY a.kind, b.kind
ORDER BY agreement, a.kind, b.kind
