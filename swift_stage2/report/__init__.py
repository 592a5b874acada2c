"""``swift-stage2 report RUN_DIR``: reads what a run left behind and tells how it went, on one page and in the terminal.

    command            options, files, exit status
    run_data           reads audits, ledgers and matches; what steps and rounds add up to is telemetry's summary
    steps_over_time    what each step cost    matches, fates   checked rollouts, and what became of them
    verdict, advice    how fast, how fast at best, what binds, which knob would help; from work
    drift, quality     how matches grow old, how good they were    selection   whom the run trained
    gallery            pictures to page through, from thumbnail
    *_section(s)       the answers in words, tables and charts, which content holds; report puts them in order
    terminal, page     the two forms; the page's charts are figures, its files page_files/

Finished, killed and running runs alike; the run itself is not touched.
"""
