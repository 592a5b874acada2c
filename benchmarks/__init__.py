"""Measurements that answer one question each, in one run, as ratios with their spread. Never imported by the package.

benches         every bench by its name, with its options and how ``bench all`` asks it
command         one parser, one directory for results, one way to fail; a bench is ``run(options, directory)``
results         tables on the terminal and as Markdown, numbers as JSON; whose turn it is; medians of rows
estimates       quartiles, paired ratios, ratios of medians, trends, each with its spread or interval (pure)
servers         rollout servers on free ports, and the YAML of a learner beside them; stand_in_server: one that only
                waits
learner_job     training runs beside a stand-in; clocks: what is noted of their steps; plugins: what runs in them
swift_program   ``swift sft`` and ``swift rlhf`` themselves
all_benches     all of them, one after the other, as one page

learning        does channel B pay? A alone against a share of B: F1 on the same held-out scenes
staleness       does the age of a rollout matter? the same job with forced version lags
overhead        what does the trainer cost when B is off? against plain ``swift sft`` at the same time
sync            what does a round cost? against a bare copy (sync_learner) and a raw_broadcast of the same bytes
pending         how long does a round wait for rollouts? with aborts and without
merge           does a server stay full at several client ranks? stock, stock merged, ours
interference    what does the pipeline cost steps beside it? switched on and off in one run
overlap         how much of the bound does asynchrony reach? against the same work done inline
peer            how idle is a learner? ours and ms-swift's own asynchronous GRPO
plan            what does it cost to plan a step? against a bare all-reduce
preprocess      how fast is what follows a rollout? against the bare template (preprocess_stages, crowds)
evaluate        how long do all metrics of a data set take? pycocotools and globox beside
faults          does anything get lost when a server breaks? attacks: when a peer lies? wrong_inputs: is it told?
make_stage1     how the demo's checkpoint was made: ``python -m benchmarks.make_stage1 OUT_DIR``
gpu_check       scripts/gpu-check: what only a GPU can show, with a parser of its own (docs/gpu)
"""
