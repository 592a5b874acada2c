"""The learner inside ms-swift.

sft             from a configuration to an exit status: what ``swift-stage2 train`` runs on every rank
stage2_trainer  ms-swift's trainer, whose steps may train channel B, and the pipeline that makes it
best_model      evaluations on the servers as Hugging Face's: best metric and checkpoint, early end
"""
