"""Shows what only a GPU can, in ten minutes, without network or weights from a hub: one JSON and one page.

    run             swift-stage2 gpu-check: every stage in a process of its own, one after the other
    stage           what a stage is, is given and leaves behind
    stages          all of them, in order
    stage_process   runs one stage: python -m swift_stage2.gpu_check.stage_process
    page            the report as Markdown
    wheels          the folder of packages that such a machine lacks: collected here, installed there
    models          random weights of real shapes, and tiny ones for the rehearsal
    measuring       seconds and memory of work on a device; memory that runs out on purpose
    child_stage     that process, from the command's side
    machine  arithmetic  real_shapes  isolation  streams  round_memory  handover  training  two_ranks  zero3
    nccl_rollout    the stages themselves
    stand_in_peer   a transfer's other end; lone_nccl: NCCL with one rank; ipc_reader: handover's second process
    job             a learner beside our server on one device; rank_on_first_device: one of its ranks

Every stage has a rehearsal on CPU with tiny shapes (``--rehearse``), which the tests run.
"""
