"""A learner's process on a host of its own: one sync round for each endpoint that the arguments name, told as JSON.

``python one_round.py TIMEOUT_S ENDPOINT …``, each endpoint the JSON of a ``ServerEndpoint``'s fields.
"""

from __future__ import annotations

import json
import sys

import torch
from live_server import load_learner
from test_weight_sync import GenerateCanary
from weight_rounds import make_sync

from swift_stage2.weights.courier import ThreadCourier, transport_for
from swift_stage2.weights.transport import ServerEndpoint


def main(timeout_s: float, endpoints: list[ServerEndpoint]) -> None:
    torch.set_num_threads(1)
    module = load_learner(seed=1)
    for version, endpoint in enumerate(endpoints, start=1):
        courier = ThreadCourier(
            [endpoint], lambda info: transport_for(info, device=torch.device("cpu"), api_key=None)
        )
        sync = make_sync(module, courier, canary=GenerateCanary(module), timeout_s=timeout_s)
        report = sync.run(version, [0]).reports[0]
        sync.close()
        told = {
            "proven": report.proven,
            "error": report.error,
            "proof": report.proof,
            "seconds": report.seconds,
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), [ServerEndpoint(**json.loads(text)) for text in sys.argv[2:]])
