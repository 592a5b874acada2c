"""Shows what only a GPU can, in ten minutes, without network or weights from a hub: one JSON and one page.

    command        scripts/gpu-check: every stage in a process of its own, one after the other
    stage          all stages in order, what one is given, and the page of what they found
    stage_process  one stage's process: started and followed, and what runs in it
    wheels         the folder of packages that such a machine lacks: collected here, installed there
    device  real_shapes  training  nccl_rollout
                   the stages themselves, with what they measure by

Every stage has a rehearsal on CPU with tiny shapes (``--rehearse``), which the tests run.
"""
