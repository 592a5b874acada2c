"""Turns samples into rollouts: asks proven rollout servers, and says what became of every sample.

client         all servers: takes samples from the pipeline, gives their ends back, and owns the event loop
server_client  one server: a task per POST, each under a ticket of its fence; whose fault an end is
batch          the samples of a POST, until each has an end
server_state   whether a server may be asked (proven, suspect, busy with an abandoned POST), and which versions answered
requests       the settings and the seed of a POST, and the words for its end
routes         one HTTP call to each kind of server, and how it ended
"""

from swift_stage2.channel_b.rollouts.client import RolloutClient
from swift_stage2.channel_b.rollouts.requests import RequestObserver, RequestSettings

__all__ = ["RequestObserver", "RequestSettings", "RolloutClient"]
