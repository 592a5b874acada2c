"""``swift-stage2 doctor CONFIG.yaml [--live]``: everything that can be known before training, as one table.

command                     options, the order of the checks, table and JSON
examination                 one row (a finding); runs checks in order, skips what rests on a failed one
configuration               without a server: rules with their numbers, launch plan, directory, hosts, ports and key
data                        model, rows, and a few samples as the real template sees them
preparation                 ms-swift's own pipeline up to where training would begin
live_servers                ``--live``, server by server, and one sync round for each, with
server_identity  rollouts   who answers and with which model; prompts and timed calls
log_prob_gap                by how much both sides' log-probabilities of the rollouts differ, and why
coordinates                 ``--coordinates``, also live: in which numbers boxes are written; both sides' pixel limits
feeding                     pure: can the servers feed channel B, and which settings fit
"""
