"""Turns samples into rollouts: asks proven rollout servers, and says what became of every sample.

client         all servers: takes samples from the pipeline, gives their ends back, and owns the event loop
server_client  one server: a task per POST, each under a ticket of its fence; whose fault an end is
server_state   whether a server may be asked (proven, suspect, busy with an abandoned POST), and which versions answered
placement      which server gets the next requests, and how many at once (pure)
seeds          no two POSTs of a run have one seed (pure)
infer_route    ``/infer/`` of our server and of a stock one, and how a call ended: what 429 and other statuses mean
chat_route     the same for a plain vllm serve, which takes one request a call
http           one HTTP call with one deadline
"""

from swift_stage2.channel_b.rollouts.client import RolloutClient
from swift_stage2.channel_b.rollouts.requests import RequestObserver, RequestSettings

__all__ = ["RequestObserver", "RequestSettings", "RolloutClient"]
