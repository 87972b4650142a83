-- id: error_messages
-- title: What tools complain of most
-- kind: failure
-- version: 1
-- grain: one row per tool and message, numbers and quoted names left out
-- reads: ordered_calls
-- why: ten messages explain most failed calls; each names a habit to unlearn or a description to improve
WITH messages AS (
    SELECT
        episode_id,
        step_index,
        tool,
        substr(
            regexp_replace(
                regexp_replace(split_part(trim(stderr), chr(10), 1), '''[^'']*''|"[^"]*"', '…', 'g'),
                '[0-9]+', 'N', 'g'
            ),
            1, 120
        ) AS message
    FROM ordered_calls
    WHERE failed AND trim(stderr) <> ''
)

SELECT
    tool,
    message,
    count(*) AS calls,
    count(DISTINCT episode_id) AS episodes,
    min(episode_id) AS sample
FROM messages
GROUP BY tool, message
ORDER BY calls DESC, tool, message
LIMIT 50
