-- id: syntax_error
-- title: A command or query that did not parse and was never put right
-- kind: qa
-- category: format
-- severity: warn
-- version: 1
-- penalty: 0.15
-- fail_reason: syntax_error
-- grain: call
-- reads: ordered_calls
-- why: tells clumsy writing of commands from wrong ideas. A later call of the same tool that worked puts it right.
WITH syntax_errors AS (
    SELECT *
    FROM ordered_calls
    WHERE
        failed
        AND regexp_like(
            stderr,
            'syntax error|unexpected token|unexpected EOF|unterminated|parse error|SyntaxError|IndentationError',
            'i'
        )
),

last_success AS (
    SELECT episode_id, tool, max(call_number) AS call_number
    FROM ordered_calls
    WHERE outcome = 'ok'
    GROUP BY episode_id, tool
)

SELECT
    e.episode_id,
    e.step_index,
    concat(e.tool, ': ', substr(e.stderr, 1, 120)) AS detail
FROM syntax_errors AS e
LEFT JOIN last_success AS s ON e.episode_id = s.episode_id AND e.tool = s.tool
WHERE s.call_number IS NULL OR s.call_number < e.call_number
ORDER BY e.episode_id, e.call_number
