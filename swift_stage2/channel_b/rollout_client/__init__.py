"""Turns samples into rollouts: asks proven rollout servers, and says what became of every sample.

    client       one batch over all servers, one outcome back; the only name other modules need
    lane         what this rank does with one server, one call at a time
    share        one server's part of a batch, and what became of it
    plan         which requests go into the next POST after an error or a timeout (pure)
    placement    how many samples of a batch each server gets (pure)
    terms        how a batch is decoded, under which version, and who hears of its POSTs
    seeds        the seed of a POST (pure)
    trust        whether one server may be asked: proven, suspect, busy with an abandoned POST
    connection   one HTTP call with one deadline, and how it ended

The pipeline calls ``RolloutClient.generate``.
"""

from swift_stage2.channel_b.rollout_client.client import RolloutClient
from swift_stage2.channel_b.rollout_client.terms import PostEvents, Terms

__all__ = ["PostEvents", "RolloutClient", "Terms"]
