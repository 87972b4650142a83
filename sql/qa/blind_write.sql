-- id: blind_write
-- title: A file was written without having looked
-- kind: qa
-- category: logic
-- severity: warn
-- version: 1
-- penalty: 0.3
-- fail_reason: retrieval_omission
-- grain: call
-- reads: file_changes, ordered_calls
-- why: what is written depends on what is there. It trips where an existing file was changed that no earlier call named or listed and
--   the episode did not make, and where the very first thing an episode did was to write.
WITH changes AS (
    SELECT
        *,
        regexp_replace(path, '^.*/', '') AS name
    FROM file_changes
),

earlier AS (
    SELECT
        changes.episode_id,
        changes.call_number,
        changes.path,
        count(c.call_number) AS n_calls,
        coalesce(
            bool_or(strpos(c.arguments, changes.name) > 0 OR strpos(c.stdout, changes.name) > 0),
            false
        ) AS seen
    FROM changes
    LEFT JOIN ordered_calls AS c
        ON changes.episode_id = c.episode_id AND c.call_number < changes.call_number AND NOT c.failed
    GROUP BY changes.episode_id, changes.call_number, changes.path
),

judged AS (
    SELECT
        changes.*,
        CASE
            WHEN earlier.n_calls = 0 THEN 'before looking at anything'
            WHEN changes.change IN ('modified', 'deleted') AND NOT earlier.seen THEN 'never read or listed'
        END AS flaw
    FROM changes
    INNER JOIN earlier
        ON
            changes.episode_id = earlier.episode_id
            AND changes.call_number = earlier.call_number
            AND changes.path = earlier.path
)

SELECT
    episode_id,
    step_index,
    concat(path, ' ', change, ', ', flaw) AS detail
FROM judged
WHERE flaw IS NOT NULL
ORDER BY episode_id, call_number, path
