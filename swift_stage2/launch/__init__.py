"""Rollout servers and learner as one job that leaves nothing running, whatever way it ends.

    launcher ──► supervisor ──► swift rollout ──► engine processes, adopted by the supervisor when their parent dies
        │  └───► supervisor ──► torchrun ──► ranks, each in a session of its own
        └── follows logs/*.log and shows every line with its source

A supervisor ends its whole tree when the launcher says so, and when the kernel tells it that the launcher is gone. One
that is killed leaves its tree to the launcher, which ends it. Nothing here knows ms-swift.
"""
