"""Measurements that answer one question each, in one run, as ratios with their spread.

    run             swift-stage2 bench NAME …
    learning        does channel B pay? A alone against a share of B: F1 on the same held-out scenes
    overhead        what does the trainer cost when B is off? against plain ``swift sft``
    plain_sft       the other arm's program
    step_clock      the plugin that overhead gives to both arms
    paired_steps    paired step times into medians and bounds

Results are printed as a table and written as JSON with everything that was measured.
"""
