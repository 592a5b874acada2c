"""Sends what a hostile or broken peer may send, and counts how each try ends.

run        all groups, one table; exit status 1 if one try ended as none may; how tries are counted
answers    servers' answers: odd ones, and ones without an end; hostile_server: where they come from
requests   callers' requests: files named, sizes claimed, bodies without sense, callers that vanish
rounds     uninvited peers, stores, waits beside a frozen learner, weights that lie
"""
