"""The background half: what the model says becomes what the model is trained on.

    learner ──StepView──────────────────────────────┐
                                                    ▼
    sample_source ─► encoding ─► rollout_client ─► task ──────────► encoding ─► packing ─► ready_queue ─► learner
      draw           request     POST /infer/      parsing            segment    select     reserve
        ▲                        (fence ticket)    matching           collate    pack       take │ release
        │                                          targets                                       │
        └────── returned, stale or overflowed samples, asked again before any new one ◄──────────┘

``swift_stage2.records`` holds everything that flows, in flow order; ``sample_events.py`` what the ledger is told;
``packing_line.py`` the last stages as functions; ``pipeline.py`` is the only file that knows this order. From rollout
to pack it asks a preprocessor: ``preprocessing.py`` on its own thread, or ``preprocessing_process.py``, which asks
``preprocessing_worker.py`` in a process beside the rank and gets packs through ``shared_batch.py``. The pipeline's
thread owns client, preprocessor and segments; source and queue are shared with the main thread and lock for themselves.
"""
