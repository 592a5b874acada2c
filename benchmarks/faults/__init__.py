"""A real training job that is broken in every way, and what became of it.

bench          swift-stage2 bench faults: the part that is asked for, and whatever it starts
table          every fault in a job of its own: how it is committed and healed, and what is written of it
kills          the run killed at random points; outage: without a server; soak: under random faults
scene          one fault in progress: a job, its server, and the few moves that faults are made of
server         the rollout server: started, killed in part or as a whole, restarted; leftovers: what outlives a tree
training_job   the learner: two torchrun ranks, followed through their event logs
accounting     events into what the tables say (pure)
"""
