"""A process in front of one stock ``swift rollout``: the ``/infer/`` calls of all ranks leave as one POST.

app            binds, serves, ends            main()
merger         stock's paths; one call to the server at a time, in the order of arrival
└── merged_post    several /infer/ bodies into one, one reply into several (pure)
"""
