"""The program that every rank of ``swift sft`` runs, unchanged, on a machine whose torchvision needs help.

``torchrun -m benchmarks.plain_sft ARGUMENTS`` is ``swift sft ARGUMENTS``: the command only starts
torchrun with this module. Nothing of stage 2 but the declarations for torchvision is imported.
"""

from __future__ import annotations

import runpy

from swift_stage2.cpu_torchvision import declare_operators

if __name__ == "__main__":
    declare_operators()
    runpy.run_module("swift.cli.sft", run_name="__main__", alter_sys=True)
