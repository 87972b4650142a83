-- id: fail_reasons
-- title: The failure labels in the order in which they win
-- kind: view
-- version: 1
-- grain: one row per label
-- reads: nothing
-- why: an episode has one label; where several causes were found the one nearest to the root wins, and a wrong result is what
--   remains when no cause was found
SELECT
    column1 AS fail_reason,
    column2 AS priority
FROM (
    VALUES
        ('environment', 1),
        ('format', 2),
        ('syntax_error', 3),
        ('tool_error', 4),
        ('timeout', 5),
        ('resource', 6),
        ('loop', 7),
        ('retrieval_omission', 8),
        ('logic_break', 9),
        ('false_claim', 10),
        ('gave_up', 11),
        ('step_limit', 12),
        ('wrong_result', 13)
)
