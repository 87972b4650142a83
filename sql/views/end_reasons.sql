-- id: end_reasons
-- title: Why episodes end, whether that is infrastructure, and the failure label that follows when nothing more specific is found
-- kind: view
-- version: 1
-- grain: one row per end reason
-- reads: nothing
-- why: the one place that says which ends never vote
SELECT
    column1 AS end_reason,
    column2 AS infrastructure,
    column3 AS fail_reason
FROM (
    VALUES
        ('submitted', false, 'wrong_result'),
        ('gave_up', false, 'gave_up'),
        ('step_limit', false, 'step_limit'),
        ('episode_timeout', false, 'timeout'),
        ('context_limit', false, 'resource'),
        ('parse_limit', false, 'format'),
        ('other', false, 'wrong_result'),
        ('sandbox_fault', true, 'environment'),
        ('endpoint_fault', true, 'environment'),
        ('host_fault', true, 'environment'),
        ('verifier_fault', true, 'environment'),
        ('interrupted', true, 'environment')
)
