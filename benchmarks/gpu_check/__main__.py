"""``python -m benchmarks.gpu_check …`` is ``swift-stage2 gpu-check …``, which starts it from a checkout."""

from __future__ import annotations

import sys

from benchmarks.gpu_check.command import main
from swift_stage2.cli import ended

if __name__ == "__main__":
    sys.exit(ended("gpu-check", lambda: main(sys.argv[1:])))
