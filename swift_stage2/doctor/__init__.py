"""``swift-stage2 doctor CONFIG.yaml [--live]``: everything that can be known before training, as one table.

finding        one row: what was looked at, what was found, how bad it is, the fix
examination    runs checks in order; what rests on a failed check is not run and says so
configuration  data  address            without a server: numbers, model, data, ports, hosts, key
preparation                             ms-swift's own pipeline up to where training would begin
server_identity  fingerprint  prompts  parameters  dry_round  rollouts      with ``--live``: one server
feeding                                 pure: can the servers feed channel B, and which settings fit
findings_table  command                 how it is shown, and the command itself
"""
