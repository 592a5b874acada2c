"""Runs the real launcher on commands given as JSON.

usage: stand_in_launch.py '{"log_dir", "servers": [[port, argv…]…], "learner": argv, "grace_s", …}'

No "learner": servers alone. "upstream_port": the one server listens there, behind a merger on its port.
"devices": CUDA_VISIBLE_DEVICES of each server, "learner_devices" the learner's. "is_check": the learner is the doctor.
"""

import json
import os
import sys
from pathlib import Path

from swift_stage2.config import RestartConfig, RestartPolicy, ServerConfig
from swift_stage2.errors import UserError
from swift_stage2.launch.launcher import run_plan
from swift_stage2.launch.plan import EXIT_STATUS_FILE, LaunchPlan, PlannedServer
from swift_stage2.runtime.supervisor import Command

SERVER_GRACE_S = 0.5  # the stand-in engine ignores SIGTERM: there is nothing to wait for

spec = json.loads(sys.argv[1])
log_dir = Path(spec["log_dir"])
status_file = log_dir / "status"
environment = dict(os.environ) | {EXIT_STATUS_FILE: str(status_file)}


def command(name: str, argv: list[str], grace_s: float, devices: str = "") -> Command:
    seen = environment | {"CUDA_VISIBLE_DEVICES": devices}
    return Command(name=name, argv=(sys.executable, *argv), environment=seen, grace_s=grace_s)


def show(line: str) -> None:
    print(line, flush=True)
    if spec.get("break_at") and spec["break_at"] in line:
        raise RuntimeError("the launcher itself breaks")


def merger(index: int, port: int) -> Command | None:
    if "upstream_port" not in spec:
        return None
    upstream = f"http://127.0.0.1:{spec['upstream_port']}"
    argv = ["-m", "swift_stage2", "merge", "--upstream", upstream, "--port", str(port)]
    return command(f"merger{index}", argv, 10.0)


restart = dict(spec.get("restart", {}))
servers = tuple(
    PlannedServer(
        command=command(
            f"server{index}", argv, SERVER_GRACE_S, spec["devices"][index] if "devices" in spec else ""
        ),
        address=ServerConfig(base_url=f"http://127.0.0.1:{port}"),
        index=index,
        merger=merger(index, port),
        upstream_port=spec.get("upstream_port"),
        is_stock=bool(spec.get("is_stock")),
    )
    for index, (port, *argv) in enumerate(spec["servers"])
)
plan = LaunchPlan(
    servers=servers,
    learner=command("learner", spec["learner"], spec["grace_s"], spec.get("learner_devices", ""))
    if spec["learner"]
    else None,
    log_dir=log_dir,
    exit_status_file=status_file,
    restart=RestartConfig(policy=RestartPolicy(restart.pop("policy", "never")), **restart),
    is_check=bool(spec.get("is_check")),
)
try:
    sys.exit(run_plan(plan, spec.get("start_timeout_s", 60.0), show, verbose=spec.get("verbose", True)))
except UserError as exc:
    print(f"refused: {exc}", flush=True)
    sys.exit(2)
