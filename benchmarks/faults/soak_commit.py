"""Commits one planned fault of a soak in its scene and undoes it. Called by the soak, between two steps."""

from __future__ import annotations

from benchmarks.faults.proxy import ReplyFault
from benchmarks.faults.scene import Scene
from benchmarks.faults.soak_plan import FaultKind, PlannedFault
from benchmarks.faults.stopped import stopped
from benchmarks.faults.switches import SLOW_DISK
from benchmarks.faults.training_job import Victim

_REPLY_FAULTS = {
    FaultKind.LATE_REPLIES: ReplyFault.DELAY,
    FaultKind.HTTP_500: ReplyFault.HTTP_500,
    FaultKind.CUT_REPLY: ReplyFault.CUT,
}


def commit(fault: PlannedFault, scene: Scene) -> None:
    """Returns once nothing stands in the way of a proof any more.

    Raises:
        ChildFailed: the learner ended, or what the fault waits for did not come.
    """
    scene.mark_fault()
    match fault.kind:
        case FaultKind.KILL_SERVER:
            scene.kill_server()
            scene.job.wait_for_steps(fault.count)
            scene.start_server()
        case FaultKind.LATE_REPLIES | FaultKind.HTTP_500 | FaultKind.CUT_REPLY:
            goal = len(scene.proxy.committed) + fault.count
            for _ in range(fault.count):
                scene.proxy.commit_next(_REPLY_FAULTS[fault.kind], delay_s=fault.seconds)
            scene.wait_for(lambda: len(scene.proxy.committed) >= goal, f"{fault.count} replies are disturbed")
        case FaultKind.SLOW_DISK:
            scene.switches.set(SLOW_DISK, str(fault.seconds))
            try:
                scene.job.wait_for_steps(fault.count)
            finally:
                scene.switches.clear(SLOW_DISK)
        case FaultKind.STOP_RANK:
            with stopped(scene.job.processes_of((Victim.RANK_0, Victim.RANK_1)[fault.rank])):
                scene.job.wait_s(fault.seconds)
        case FaultKind.STOP_SERVER:
            with stopped(scene.server.processes):
                scene.job.wait_s(fault.seconds)
    scene.mark_healed()
