"""Our rollout server: stock ``swift rollout``'s routes, truthful, with rounds that prove what was loaded.

command_line  which engine, where; the rest is ms-swift's to read     main()
└── server_command       what it asks for
app       binds, loads, serves, ends              serve()
└── server_children      nothing that an engine starts outlives the server
routes    paths, statuses                         create_app()
└── infer_wire           /infer/ body in, RolloutOutput records out
service   engine + rounds + who answers           RolloutService
├── weight_rounds        which step is allowed now; the door of /infer/
│   └── weight_receiver  buckets off the wire, against the manifest, checksums
└── engine               the base of every engine: thread, state, open jobs
    ├── jobs                     requests that each end exactly once
    ├── swift_seams              ms-swift opens nothing by name, runs no checkpoint's Python, names its tensors
    ├── transformers_engine      one thread, shared batches
    │   ├── row_sampling         own seed, limit and abort per row
    │   └── swift_generator      ms-swift's TransformersEngine
    └── vllm_engine              one thread with a loop, in front of vLLM's processes
        ├── vllm_generator       ms-swift's GRPOVllmEngine
        └── vllm_weights         weights to the workers, and what they hold then; there: vllm_worker
"""
