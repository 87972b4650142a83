-- id: training_curves
-- title: Training measures side by side
-- kind: metric
-- version: 2
-- grain: one row per stage_run and optimiser step
-- reads: train_metrics
-- why: the long form is for machines; people read the curves side by side
SELECT
    stage_run,
    step,
    max(value) FILTER (WHERE name = 'loss') AS loss,
    max(value) FILTER (WHERE name = 'kl') AS kl,
    max(value) FILTER (WHERE name = 'entropy') AS entropy,
    max(value) FILTER (WHERE name = 'clip_share') AS clip_share,
    max(value) FILTER (WHERE name = 'grad_norm') AS grad_norm,
    max(value) FILTER (WHERE name = 'tokens_per_second') AS tokens_per_second,
    max(value) FILTER (WHERE name = 'validation_success') AS validation_success,
    max(value) FILTER (WHERE name = 'validation_mean_steps') AS validation_mean_steps,
    max(value) FILTER (WHERE name = 'validation_tool_accuracy') AS validation_tool_accuracy
FROM train_metrics
GROUP BY stage_run, step
ORDER BY stage_run, step
