"""A file for ``swift rollout --external_plugins``, after the one that proves weights: loads that go wrong on demand.

ms-swift imports it in the processes that run engines; vLLM finds the extension below by name in its workers.
"""

from __future__ import annotations

from swift_stage2.stock_proof import sums_server

sums_server.WORKER_EXTENSION = "faulty_worker.FaultyExtension"
