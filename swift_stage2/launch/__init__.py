"""Rollout servers and learner as one job that leaves nothing running, whatever way it ends.

    launcher ── control pipe ──► warden ──► swift rollout ──► engine processes
        │                                        (adopted by the warden when their parent dies)
        ├────── control pipe ──► warden ──► torchrun ──► ranks, each in a session of its own
        │
        └── follows logs/*.log and shows every line with its source

The pipe closes when the launcher ends its job and also when it is killed: a warden then ends its whole
tree. A warden that is killed leaves its tree to the launcher, which ends it. Nothing here knows ms-swift.
"""
