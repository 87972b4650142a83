-- id: parse_error
-- title: A turn that could not be parsed
-- kind: qa
-- category: format
-- severity: warn
-- version: 1
-- penalty: 0.1
-- grain: step
-- reads: steps
-- why: the agent lost a turn to form. Cut replies are another rule's, since more tokens cure them and practice does not.
SELECT
    episode_id,
    step_index,
    coalesce(parse_error, 'no usable call') AS detail
FROM steps
WHERE parse_status = 'error' AND finish_reason IS DISTINCT FROM 'length'
ORDER BY episode_id, step_index
