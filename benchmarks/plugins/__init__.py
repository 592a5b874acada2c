"""Files for ms-swift's ``--external_plugins``, in a folder of their own because ms-swift puts it on ``sys.path``.

clocks    callbacks that note what a learner's threads use, or what stage 2's hooks take, per step
lagging   channel B made inline, with a forced lag
grpo      the clock and the reward of ms-swift's GRPO
faults    the real trainer, which notes what rollouts it trains
"""
