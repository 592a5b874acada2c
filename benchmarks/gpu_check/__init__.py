"""Shows what only a GPU can, in ten minutes, without network or weights from a hub: one JSON and one page.

    command         swift-stage2 gpu-check: every stage in a process of its own, one after the other
    report          what was found so far, as JSON and as Markdown
    stage           all stages in order; what one is given and leaves behind
    stage_process   one stage's process: started and followed, and what runs in it
    wheels          the folder of packages that such a machine lacks: collected here, installed there
    models          random weights of real shapes, and tiny ones for the rehearsal
    measuring       seconds and memory of work on a device
    device  real_sizes  isolation  streams  handover  training  nccl_rollout
                    the stages themselves
    job             a learner beside our server on one device
    processes       servers and learners of a stage: started, waited for and ended

Every stage has a rehearsal on CPU with tiny shapes (``--rehearse``), which the tests run.
"""
