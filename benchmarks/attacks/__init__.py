"""Sends what a hostile or broken peer may send, and counts how each try ends.

    result     one kind of attack: how often it was tried, how each try ended, what it cost; how tries are counted
    run        all groups, one table; exit status 1 if one try ended as none may
    answers    servers' answers: odd ones, and ones without an end
    requests   callers' requests: files named, sizes claimed, bodies without sense, callers that vanish
    rounds     uninvited peers, stores, waits beside a frozen learner, weights that lie

Every group is a module with a function ``attacks() -> list[AttackResult]``.
"""
