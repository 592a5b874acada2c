"""The background half: what the model says becomes what the model is trained on.

    learner ──StepView──────────────────────────────┐
                                                    ▼
    sample_source ─► encoding ─► rollouts ───────► task ──────────► encoding ─► packing ─► ready_queue ─► learner
      draw           request     POST /infer/      parsing            segment    select     reserve
        ▲                        (fence ticket)    matching           collate    pack       take │ release
        │                                          targets                                       │
        └────── returned, stale or overflowed samples, asked again before any new one ◄──────────┘

``swift_stage2.records`` holds everything that flows, in flow order; ``pipeline.py`` is the only file that knows this
order, ``docs/design/channel_b.md`` follows one row through it. From rollout to pack it asks a preprocessor, on its own
thread or in a process beside the rank: ``preprocessing.py``, ``preprocessing_process.py``. The pipeline's thread owns
client, preprocessor and segments; source and queue are shared with the main thread and lock for themselves.
"""
