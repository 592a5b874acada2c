"""Runs the real launcher on commands given as JSON.

usage: stand_in_launch.py '{"log_dir", "servers": [[port, argv…]…], "learner": argv, "grace_s", …}'
"""

import json
import os
import sys
from pathlib import Path

from swift_stage2.config import ServerConfig
from swift_stage2.errors import UserError
from swift_stage2.launch.launcher import run_plan
from swift_stage2.launch.plan import EXIT_STATUS_FILE, LaunchPlan, PlannedServer
from swift_stage2.launch.process_tree import Command

SERVER_GRACE_S = 0.5  # the stand-in engine ignores SIGTERM: there is nothing to wait for

spec = json.loads(sys.argv[1])
log_dir = Path(spec["log_dir"])
status_file = log_dir / "status"
environment = dict(os.environ) | {EXIT_STATUS_FILE: str(status_file)}


def command(name: str, argv: list[str], grace_s: float) -> Command:
    return Command(name=name, argv=(sys.executable, *argv), environment=environment, grace_s=grace_s)


def show(line: str) -> None:
    print(line, flush=True)
    if spec.get("break_at") and spec["break_at"] in line:
        raise RuntimeError("the launcher itself breaks")


servers = tuple(
    PlannedServer(
        command=command(f"server{index}", argv, SERVER_GRACE_S),
        address=ServerConfig(base_url=f"http://127.0.0.1:{port}", group_port=1),
        key=f"rollout.servers[{index}]",
    )
    for index, (port, *argv) in enumerate(spec["servers"])
)
plan = LaunchPlan(
    servers=servers,
    learner=command("learner", spec["learner"], spec["grace_s"]),
    log_dir=log_dir,
    exit_status_file=status_file,
)
try:
    sys.exit(run_plan(plan, None, spec.get("start_timeout_s", 60.0), show))
except UserError as exc:
    print(f"refused: {exc}", flush=True)
    sys.exit(2)
