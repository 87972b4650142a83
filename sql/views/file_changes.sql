-- id: file_changes
-- title: Every change of every file, in order
-- kind: view
-- version: 1
-- grain: one row per tool call and changed file
-- reads: tool_calls
-- why: which call made, changed or removed which file
WITH numbered AS (
    SELECT
        run_id,
        episode_id,
        step_index,
        call_index,
        row_number() OVER (
            PARTITION BY run_id, episode_id
            ORDER BY step_index, call_index
        ) AS call_number,
        files_changed
    FROM tool_calls
),

each AS (
    SELECT run_id, episode_id, step_index, call_index, call_number, unnest(files_changed) AS file
    FROM numbered
)

SELECT
    run_id,
    episode_id,
    step_index,
    call_index,
    call_number,
    file['path'] AS path,
    file['change'] AS change,
    file['before_hash'] AS before_hash,
    file['after_hash'] AS after_hash,
    file['size_bytes'] AS size_bytes
FROM each
