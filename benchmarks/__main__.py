"""``python -m benchmarks NAME …`` is ``swift-stage2 bench NAME …``, which starts it from a checkout."""

from __future__ import annotations

import sys

from benchmarks.command import main
from swift_stage2.cli import ended

if __name__ == "__main__":
    sys.exit(ended("bench", lambda: main(sys.argv[1:])))
