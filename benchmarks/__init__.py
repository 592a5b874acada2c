"""Measurements that answer one question each, in one run, as ratios with their spread. Never imported by the package.

benches         every bench by its name, with its options
command         one parser, one directory for results, one way to fail; a bench is ``run(options, directory)``
results         tables on the terminal and as Markdown; whose turn it is; medians of rows
estimates       quartiles, paired ratios, ratios of medians, trends, each with its spread or interval (pure)
processes       whatever a bench starts, waits for and ends; servers: rollout servers on free ports, and the YAML of a
                learner beside them; stand_in_server: one that only waits
learner_job     training runs beside a stand-in; clocks: what is noted of their steps; plugins: what runs in them
scored_arms     training runs that are scored on the same held-out scenes
swift_program   ``swift sft`` and ``swift rlhf`` themselves

overlap         how much of the bound does asynchrony reach? against the same work done inline
peer            how idle is a learner? ours and ms-swift's own asynchronous GRPO
sync            what does a round cost? against a bare copy (sync_learner) of the same bytes
learning        does channel B pay? A alone against a share of B: F1 on the same held-out scenes
staleness       does the age of a rollout matter? the same job with forced version lags
faults          does anything get lost when something breaks?
overhead        what does the trainer cost when B is off? against plain ``swift sft`` at the same time
plan            what does it cost to plan a step? against a bare all-reduce
preprocess      how fast is what follows a rollout? the match against its bare parts (crowds)
tiny_model      the demo's model, of any width: made here, and by scripts/make_stage1.py
gpu_check       scripts/gpu-check: what only a GPU can show, with a parser of its own (docs/gpu)
"""
