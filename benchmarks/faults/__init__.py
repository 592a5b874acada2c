"""Every fault of the table, committed for real under a real training job, and what became of it.

run            swift-stage2 bench faults …
rows           the faults as data, and how each is committed and healed
scene          one row in progress, and the moves that rows are made of
server         the rollout server: started, killed in part or as a whole, restarted
training_job   the learner: two torchrun ranks, followed through their audits
proxy          between the two, where a reply is cut or comes late
switches       how learner and server are told which fault to commit
learner_plugin, faulty_server   who commits them
row_data       scenes, a poisonous image, another model
accounting     audits and checkpoint into what the table says (pure)
fault_table    the table and the JSON
leftovers      processes, ports and shared memory that should have gone
"""
