"""The plugin for ``swift rollout --external_plugins``: the server shows which weights it holds, tensor by tensor."""

import sys

from swift_stage2.stock_proof.sums_server import register_server

if (program := sys.modules.get("swift.pipelines.infer.rollout")) is not None:
    register_server(program)
