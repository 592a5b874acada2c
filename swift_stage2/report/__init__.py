"""``swift-stage2 report RUN_DIR``: reads what a run left behind and tells how it went, on one page and in the terminal.

    command            options, sections in order, files, exit status
    run_data           reads and checks what a run left behind; telemetry's summary adds up steps and rounds
    verdict            how fast, how fast at best, what binds and which setting helps
    steps              what was wanted and what ran, drops, where time went, queue and lag, sync rounds, the account
    quality            how good rollouts were before correction, detection over steps, pictures, suspected label errors
    content            sections of sentences, tables and pictures, and the two forms of them

``swift-stage2 rollouts RUN_DIR`` follows the rollouts of a run: rollouts_command reads and prints them.

Finished, killed and running runs alike; the run itself is not touched.
"""
