"""``python -m swift_stage2`` is ``swift-stage2``; torchrun starts the ranks this way."""

from __future__ import annotations

import sys

from swift_stage2.cli import main

if __name__ == "__main__":
    sys.exit(main())
