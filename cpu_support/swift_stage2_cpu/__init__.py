"""Lets stock `swift rollout` run on a machine without a GPU; a distribution of its own.

Three extension points, no stock file changed: ``torch_backend`` (PyTorch's device autoload) lets a CUDA-built
torchvision import, ``vllm_plugin`` (``vllm.general_plugins``) lets vLLM's CPU workers take new weights over gloo,
``swift_plugin`` (a file for ``--external_plugins``) lets ms-swift start without counting GPUs. On a machine
with a GPU all three do nothing.
"""
