-- id: scores
-- title: Quality, tier, weight and failure label of each episode
-- kind: score
-- version: 1
-- grain: one row per episode
-- reads: current_findings, end_reasons, episode_outcomes, fail_reasons, rules
-- param: graded_from = 0.5
-- param: weight_floor = 0.1
-- why: quality tells how cleanly an episode was done: each rule that hit takes its share once, however often it hit. The tier tells how it
--   ended: positive is success without a blocking finding; negative is failure; in between is graded: success with a blocking
--   finding, partial credit from $graded_from on, or no verdict. The weight falls with quality and never to zero, except for what
--   infrastructure ended. The failure label is the first by priority among what the rules found, what the end reason says, and a wrong
--   result.
WITH hits AS (
    SELECT DISTINCT episode_id, rule
    FROM current_findings
),

flaws AS (
    SELECT
        hits.episode_id,
        exp(sum(ln(1.0 - rules.penalty))) AS quality,
        bool_or(rules.severity = 'block') AS blocked
    FROM hits
    INNER JOIN rules ON hits.rule = rules.id
    GROUP BY hits.episode_id
),

counts AS (
    SELECT episode_id, count(*) AS n_findings
    FROM current_findings
    GROUP BY episode_id
),

causes AS (
    SELECT hits.episode_id, rules.fail_reason
    FROM hits
    INNER JOIN rules ON hits.rule = rules.id
    WHERE rules.fail_reason IS NOT NULL
    UNION ALL
    SELECT o.episode_id, coalesce(r.fail_reason, 'wrong_result') AS fail_reason
    FROM episode_outcomes AS o
    LEFT JOIN end_reasons AS r ON o.end_reason = r.end_reason
),

ranked AS (
    SELECT
        causes.episode_id,
        causes.fail_reason,
        row_number() OVER (PARTITION BY causes.episode_id ORDER BY fail_reasons.priority) AS choice
    FROM causes
    INNER JOIN fail_reasons ON causes.fail_reason = fail_reasons.fail_reason
),

judged AS (
    SELECT
        o.episode_id,
        o.infrastructure,
        o.success,
        o.score,
        coalesce(flaws.blocked, false) AS blocked,
        CASE WHEN o.infrastructure THEN 0.0 ELSE coalesce(flaws.quality, 1.0) END AS quality,
        coalesce(counts.n_findings, 0) AS n_findings,
        ranked.fail_reason
    FROM episode_outcomes AS o
    LEFT JOIN flaws ON o.episode_id = flaws.episode_id
    LEFT JOIN counts ON o.episode_id = counts.episode_id
    LEFT JOIN ranked ON o.episode_id = ranked.episode_id AND ranked.choice = 1
)

SELECT
    episode_id,
    round(quality, 6) AS quality,
    CASE
        WHEN infrastructure THEN NULL
        WHEN success AND NOT blocked THEN 'positive'
        WHEN success OR success IS NULL OR score >= $graded_from THEN 'graded'
        ELSE 'negative'
    END AS tier,
    CASE
        WHEN infrastructure THEN 0.0
        ELSE round(CAST($weight_floor AS DOUBLE) + (1.0 - CAST($weight_floor AS DOUBLE)) * quality, 6)
    END AS weight,
    CASE
        WHEN infrastructure THEN 'environment'
        WHEN success = false THEN fail_reason
    END AS fail_reason,
    CAST(n_findings AS INTEGER) AS n_findings
FROM judged
ORDER BY episode_id
