-- id: truncated_reply
-- title: A reply that the token limit cut
-- kind: qa
-- category: format
-- severity: warn
-- version: 1
-- penalty: 0.1
-- grain: step
-- reads: steps
-- why: what looks like bad syntax may be a limit that is too low; the cure is another one
SELECT
    episode_id,
    step_index,
    concat('cut after ', coalesce(CAST(generated_tokens AS VARCHAR), 'an unknown number of'), ' tokens') AS detail
FROM steps
WHERE finish_reason = 'length'
ORDER BY episode_id, step_index
