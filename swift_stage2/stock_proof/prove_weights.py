"""The plugin: ``swift rollout --external_plugins …/prove_weights.py`` shows which weights it holds, tensor by tensor.

Given to ``swift rlhf`` as well, it has ms-swift's own client compare that with what it sent, after every push.
"""

from swift_stage2.stock_proof import register

register()
