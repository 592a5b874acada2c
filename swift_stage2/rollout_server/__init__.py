"""Our rollout server: stock ``swift rollout``'s routes, truthful, with rounds that prove what was loaded.

command_line  which engine, where; the rest is ms-swift's to read     main()
├── vllm_package         whether vLLM is installed
└── server_command       what it asks for
app       binds, loads, serves, ends              serve()
└── server_children      nothing that an engine starts outlives the server
routes    paths, statuses, bearer token           create_app()
service   engine + rounds + who answers           RolloutService
├── infer_wire           /infer/ body in, RolloutOutput records out
├── sealed_template      a template that opens nothing by name; foreign_code: nor runs a checkpoint's Python
├── weight_rounds        which step is allowed now; the door of /infer/
│   └── weight_receiver  buckets off the wire, checksums
└── engine               records and the Engine Protocol
    ├── transformers_engine      one thread, shared batches
    │   ├── batching             who shares a batch
    │   ├── row_sampling         own seed, limit and abort per row
    │   └── swift_generator      ms-swift's TransformersEngine
    └── vllm_engine              one thread with a loop, in front of vLLM's processes
        ├── vllm_generator       ms-swift's GRPOVllmEngine; checkpoint_manifest names its tensors
        └── shared_staging       weights to the workers; there: vllm_worker, load_trace
"""
