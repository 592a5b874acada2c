"""Every check before a run, once: ``doctor`` prints a row for each, ``train`` and ``launch`` stop at the first.

checks            the list of those that need no template: configuration, addresses, files, rows, run directory, ports
model             directories and families of models
servers           the probe that says who a server is; addresses, ports
swift_parsing     arguments through ms-swift's parser
samples   packing_isolation   channel_b_parts     rows as the real template sees them, and what is made of them
doctor            ``swift-stage2 doctor``: options, order and table; a check that rests on a failed one is skipped
learner   preparation         model, template, rows and memory, as the trainer would have them; a round's question
live_servers   rollouts       ``--live``, server by server: prompts, one sync round, timed calls, settings that fit
coordinates       ``--coordinates``, also live: in which numbers boxes are written
"""
