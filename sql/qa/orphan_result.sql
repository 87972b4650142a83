-- id: orphan_result
-- title: A tool's message that answers no recorded call
-- kind: qa
-- category: format
-- severity: warn
-- version: 1
-- penalty: 0.1
-- grain: step
-- reads: messages, tool_calls
-- why: the conversation and the record of calls tell different stories; mostly a sign of a damaged import
SELECT
    messages.episode_id,
    messages.step_index,
    concat('result of ''', messages.tool_call_id, '''') AS detail
FROM messages
LEFT ANTI JOIN tool_calls
    ON messages.episode_id = tool_calls.episode_id AND messages.tool_call_id = tool_calls.call_id
WHERE messages.role = 'tool' AND messages.tool_call_id IS NOT NULL
ORDER BY messages.episode_id, messages.message_index
