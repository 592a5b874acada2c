"""Measurements that answer one question each, in one run, as ratios with their spread.

    run             swift-stage2 bench NAME …
    all_benches     all of them, one after the other, as one page (benchmark_page)
    learning        does channel B pay? A alone against a share of B: F1 on the same held-out scenes
    staleness       does the age of a rollout matter? the same job with forced version lags (delayed_queue)
    faults          does anything get lost when a server breaks? a package of its own
    overhead        what does the trainer cost when B is off? against plain ``swift sft`` at the same time
    sync            what does a round cost? against a raw broadcast of the same bytes on the same transport
    pending         how long does a round wait for rollouts? with aborts and without
    merge           does a server stay full at several client ranks? stock, stock merged, ours
    interference    what does the pipeline cost steps beside it? switched on and off in one run (switched_blocks,
                    switched_pipeline)
    overlap         how much of the bound does asynchrony reach? against the same work done inline (inline_pipeline,
                    inline_plugin)
    peer            how idle is a learner? ours and ms-swift's own asynchronous GRPO (grpo_job, grpo_program,
                    grpo_plugin), told alike (learner_loop)
    plan            what does it cost to plan a step? against a bare all-reduce (plan_rank: one rank of it)
    preprocess      how fast is what follows a rollout? against the bare template (preprocess_stages, crowds)
    plain_sft       the other arm's program
    step_clock      the plugin that overhead gives to both arms
    servers         rollout servers on free ports; client_ranks: processes that post at the same moment
    raw_peer        the other end of a raw broadcast; sized_model: weights of a wanted size
    paired_steps    paired step times into medians and bounds; spread: quartiles and exponents
    stand_in_server a server that waits and does not compute; stand_in_job: runs beside it
    stock_stand_in  the same for ms-swift's own client; stock_weights: takes weights as a stock server takes them
    thread_clock    the plugin that notes what threads use per step; thread_times: what it reads
    results         tables on the terminal and as Markdown, numbers as JSON

Results are printed as a table and written as JSON with everything that was measured.
"""
