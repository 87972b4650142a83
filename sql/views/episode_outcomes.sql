-- id: episode_outcomes
-- title: Each episode with how it ended, whether it counts, and what QA made of it
-- kind: view
-- version: 1
-- grain: one row per episode
-- reads: end_reasons, episodes, final_verdicts, latest_scores
-- why: the table that most questions start from. An episode that infrastructure ended has no success, whatever was recorded.
WITH labelled AS (
    SELECT
        episodes.*,
        episodes.status = 'infrastructure' OR coalesce(end_reasons.infrastructure, false) AS infrastructure
    FROM episodes
    LEFT JOIN end_reasons ON episodes.end_reason = end_reasons.end_reason
)

SELECT
    e.run_date,
    e.purpose,
    e.run_id,
    e.episode_id,
    e.group_id,
    e.task_id,
    e.task_set,
    e.family,
    e.split,
    e.policy,
    e.policy_revision,
    e.sample_index,
    e.end_reason,
    e.infrastructure,
    e.infrastructure_cause,
    CASE WHEN NOT e.infrastructure THEN v.success END AS success,
    CASE WHEN NOT e.infrastructure THEN v.score END AS score,
    v.kind AS verdict_kind,
    e.claimed_success,
    e.claim,
    s.tier,
    s.quality,
    s.weight,
    s.fail_reason,
    e.n_steps,
    e.n_tool_calls,
    e.n_parse_errors,
    e.n_repaired,
    e.n_state_lost,
    e.prompt_tokens,
    e.generated_tokens,
    e.wall_us,
    e.model_us,
    e.tool_us,
    e.started_at,
    e.evaluation_set
FROM labelled AS e
LEFT JOIN final_verdicts AS v ON e.run_id = v.run_id AND e.episode_id = v.episode_id
LEFT JOIN latest_scores AS s ON e.run_id = s.run_id AND e.episode_id = s.episode_id
