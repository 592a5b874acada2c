"""``swift-stage2 report RUN_DIR``: reads what a run left behind and tells how it went, on one page and in the terminal.

    command            options, files, exit status
    run_data           reads and checks what a run left behind; telemetry's summary adds up steps and rounds
    report             puts the sections in order
    verdict, speed     how fast, how fast at best, what binds and which knob helps
    steps              what was wanted and what ran, drops, where time went, queue and lag, sync rounds
    matches            how good rollouts were before correction
    evaluations        detection metrics over steps;  suspects  labels that are probably wrong
    samples, gallery   what became of every sample, and pictures of the newest matches

``swift-stage2 rollouts RUN_DIR`` follows the rollouts of a run: finished_rollouts reads them, rollouts_command prints.

Finished, killed and running runs alike; the run itself is not touched.
"""
