"""Our rollout server: stock ``swift rollout``'s routes, truthful, with installs that prove what was loaded.

command_line  which engine, where; binds, loads, serves, ends              main(), serve()
routes        paths, statuses; engine + weights + who answers              RolloutService
├── weight_slot          weights that are offered, installed, proven; the gate of /infer/
│   └── weight_source    a learner's memory file, or one that a stream or a disk fills
└── engine               the base of every engine: thread, state, requests that each end exactly once
    ├── transformers_engine  one thread, shared batches
    │   └── swift_generator  ms-swift's TransformersEngine: own seed, limit and abort per row; both engines' seams
    └── vllm_engine          one thread with a loop, in front of vLLM's processes
        ├── vllm_generator   ms-swift's GRPOVllmEngine
        └── vllm_weights     what the workers read and hold; in them, and in a stock server's: vllm_worker
merge_command  one process in front of one stock server: the ranks' calls leave as one POST
└── merger              stock's paths; one call to the server at a time, in the order of arrival
stock_program  stock ``swift rollout`` as ``launch`` starts it
"""
