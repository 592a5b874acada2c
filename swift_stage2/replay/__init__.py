"""``swift-stage2 replay RUN_DIR``: takes the steps of a recorded run again, without servers and threads of its own.

    command          options, ranks started, verdict and exit status
    recorded_run     what every rank's log tells: plans, packs, completions, losses; the verdict
    rank             one rank: the run's own configuration and trainer, the recorded plan of every step, losses compared

``docs/design/scheduling.md`` tells what is the same and what is not.
"""
