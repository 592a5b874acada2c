"""``swift-stage2 report RUN_DIR``: reads what a run left behind and tells how it went, on one page and in the terminal.

    command            options, the terminal's form, files, exit status
    run_data, matches  read and check what a run left behind; telemetry's summary adds up steps and rounds
    report             puts the sections in order
    verdict            how fast, how fast at best, what binds and which knob helps, from speed and advice
    steps              what was wanted and what ran, queue, drops, where time went, sync rounds
    quality, drift     how good matches were, how they grow old
    selection, fill    whom the run trained, how full packs were
    account, gallery   what became of every sample, and pictures to page through
    content            sentences, tables and charts, of which sections are made
    page               the HTML form; its files are in page_files/

Finished, killed and running runs alike; the run itself is not touched.
"""
