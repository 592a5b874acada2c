"""Turns samples into rollouts: asks proven rollout servers, and says what became of every sample.

client       all servers: takes samples from the pipeline and gives one outcome back per share
lane         one server: its shares, one POST at a time, each under a fence ticket
connection   one HTTP call with one deadline, and how it ended: what 429 and the other statuses mean
chat_connection   the same for a plain vllm serve, which takes one request a call
plan         which servers, which requests, which seed, and whose fault an end is: the request's or the server's (pure)
trust        whether one server may be asked (proven, suspect, busy with an abandoned POST), and which weights answered
"""

from swift_stage2.channel_b.rollout_client.client import RolloutClient
from swift_stage2.channel_b.rollout_client.lane import PostEvents, Terms
from swift_stage2.channel_b.rollout_client.trust import ServedWeights

__all__ = ["PostEvents", "RolloutClient", "ServedWeights", "Terms"]
