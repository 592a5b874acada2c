"""``swift-stage2 doctor CONFIG.yaml [--live]``: everything that can be known before training, as one table.

command                               options, the order of the checks, table and JSON
examination                           one row (a finding); runs checks in order, skips what rests on a failed one
configuration  address  data          without a server: numbers, directories, hosts, ports, key, model, rows
preparation                           ms-swift's own pipeline up to where training would begin
live_servers                          ``--live``, server by server, with
server_identity  dry_round  rollouts  who answers and with which model, one sync round, prompts and timed calls
feeding                               pure: can the servers feed channel B, and which settings fit
"""
