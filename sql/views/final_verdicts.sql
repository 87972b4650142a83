-- id: final_verdicts
-- title: The verdict that counts for each episode
-- kind: view
-- version: 1
-- grain: one row per episode with a verdict other than a judge's
-- reads: verdicts
-- why: verdicts are append-only and several may exist. One that decides beats one that does not; then the task's own verifier beats a
--   later run of it, which beats what another harness recorded; then the newest. Judges are kept apart.
WITH ranked AS (
    SELECT
        *,
        row_number() OVER (
            PARTITION BY run_id, episode_id
            ORDER BY
                success IS NULL,
                CASE kind WHEN 'verified' THEN 1 WHEN 're_verified' THEN 2 ELSE 3 END,
                decided_at DESC,
                verifier
        ) AS choice
    FROM verdicts
    WHERE kind IN ('verified', 're_verified', 'recorded')
)

SELECT run_id, episode_id, kind, verifier, success, score, detail, decided_at
FROM ranked
WHERE choice = 1
