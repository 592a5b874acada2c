"""A stand-in learner: one rank in a session of its own, as torchrun's are; saves when it is asked to stop.

usage: stand_in_learner.py run | stubborn | exit STATUS [REPORTED_STATUS]
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

manner = sys.argv[1]
if manner == "exit":
    if len(sys.argv) > 3:
        Path(os.environ["SWIFT_STAGE2_EXIT_STATUS_FILE"]).write_text(sys.argv[3], encoding="utf-8")
    print("learner ends", flush=True)
    sys.exit(int(sys.argv[2]))

rank = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)


def save(number: int, frame: FrameType | None) -> None:
    print("checkpoint saved", flush=True)
    rank.terminate()
    rank.wait(timeout=30)
    sys.exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if manner == "stubborn" else save)
print(f"learner process {os.getpid()} runs", flush=True)
while True:  # pause() would miss a signal that comes right before it
    time.sleep(0.1)
