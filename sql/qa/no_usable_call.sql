-- id: no_usable_call
-- title: An episode that failed for want of a parsable call
-- kind: qa
-- category: format
-- severity: block
-- version: 1
-- penalty: 0.5
-- fail_reason: format
-- grain: episode
-- reads: episode_outcomes
-- why: nothing was tried, so nothing about the task can be learned from it
SELECT
    episode_id,
    CAST(NULL AS INTEGER) AS step_index,
    concat(n_parse_errors, ' unparsable turns, ', n_tool_calls, ' calls') AS detail
FROM episode_outcomes
WHERE
    NOT infrastructure
    AND n_parse_errors > 0
    AND (n_tool_calls = 0 OR end_reason = 'parse_limit')
ORDER BY episode_id
