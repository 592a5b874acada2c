"""``swift-stage2`` as one of several ranks that all take device 0, as if each were alone on its node."""

from __future__ import annotations

import os
import runpy

if __name__ == "__main__":
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    runpy.run_module("swift_stage2", run_name="__main__", alter_sys=True)
