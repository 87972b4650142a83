-- id: huge_output
-- title: A call whose output was too long to show
-- kind: qa
-- category: efficiency
-- severity: warn
-- version: 1
-- penalty: 0.1
-- grain: call
-- reads: tool_calls
-- param: bytes = 65536
-- why: it fills the context with what nobody reads, or is cut so that the agent acts on half of it
SELECT
    episode_id,
    step_index,
    concat(stdout_bytes + stderr_bytes, ' bytes of output', CASE WHEN truncated THEN ', cut' ELSE '' END) AS detail
FROM tool_calls
WHERE truncated OR stdout_bytes + stderr_bytes > $bytes
ORDER BY episode_id, step_index, call_index
