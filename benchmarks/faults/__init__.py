"""Every fault of the table, committed for real under a real training job, and what became of it.

bench          swift-stage2 bench faults; owns every process that kills, outage and soak start, too
rows           the faults, how each is committed and healed, and the moves that they are made of
server         the rollout server: started, killed in part or as a whole, restarted; what is left behind
training_job   the learner: two torchrun ranks, followed through their audits
proxy          between the two, where a reply is cut or comes late
commit         who commits faults inside them, told by switches; run as a program, our server with such a switch
courier        the process that carries a job's weights, with such switches
accounting     audits and checkpoint into what the table says (pure); fault_table: the table and the JSON
kills  outage  soak  soak_plan  soak_report     the other benches
"""
