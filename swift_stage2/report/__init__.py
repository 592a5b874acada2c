"""``swift-stage2 report RUN_DIR``: reads what a run left behind and says whether nothing was lost.

    command       options, files, exit status
    ledger_table  the account for a terminal
    selection     whom a run trained, compared with whom it did not
    selection_table

Finished, killed and running runs alike; the run itself is not touched.
"""
