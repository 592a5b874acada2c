"""One real sync round with the checkpoint's own weights: the server ends with what it had, and that is proven.

The whole path of a run's round (manifest, transport, push, acknowledgement, proof), on a single rank. Afterwards
our server carries this doctor's run id; the first round of a learner replaces it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress

from torch import nn

from swift_stage2.assembly import endpoints_of, transport_for
from swift_stage2.collectives import SingleRank
from swift_stage2.config import RolloutConfig
from swift_stage2.doctor.examination import Outcome, failed, ok, warning
from swift_stage2.doctor.server_identity import ServerIdentity, busy_with
from swift_stage2.errors import ServerFault
from swift_stage2.records import ServerReport
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.sync_round import Canary, WeightSync

_GIVE_UP_TIMEOUT_S = 5.0
_VERSION = 1  # of this doctor's own run
_MIB = 1 << 20


class DryRounds:
    """The doctor's run: its rounds, one server at a time."""

    def __init__(self, rollout: RolloutConfig, module: nn.Module, canary: Canary) -> None:
        self._rollout = rollout
        self._sync = WeightSync(
            endpoints_of(rollout),
            control=SingleRank(),
            export=WeightExport(module),
            canary=canary,
            make_transport=lambda info: transport_for(info, module, rollout.api_key()),
            run_id=f"doctor-{uuid.uuid4().hex[:12]}",
            timeout_s=rollout.sync.timeout_s,
            bucket_mib=rollout.sync.bucket_mib,
            proof=rollout.sync.proof,
            api_key=rollout.api_key(),
        )

    def check(self, server: int, session: ServerSession, identity: ServerIdentity) -> Outcome[ServerReport]:
        """One round to one server, refused while it works for somebody else.

        Raises:
            WeightSyncError: the learner's weights cannot be exported.
            WeightSyncHang: the push did not return; its thread cannot be ended.
        """
        if busy := busy_with(session, identity):
            return failed(
                f"left alone: {busy}",
                "end that run, or wait until it is over, and run the doctor again; --no-sync leaves the round out",
            )
        try:
            outcome = self._sync.run(_VERSION, [server])
        finally:
            self._sync.close()  # a stock server keeps a communicator until it is told to let it go
        if outcome.failed and not identity.info.stock:
            _give_up(session, outcome.round_id)
        return _describe(outcome.reports[server], identity.info.stock)


def _give_up(session: ServerSession, round_id: str) -> None:
    """Ends a failed round, which our server would hold open against the learner's first one."""
    with suppress(ServerFault):  # the server is gone, or has ended the round itself
        session.post(
            protocol.FINISH_ROUND, {"round_id": round_id, "commit": False}, Deadline(_GIVE_UP_TIMEOUT_S)
        )


def _describe(report: ServerReport, is_stock: bool) -> Outcome[ServerReport]:
    if report.error is not None:
        return failed(report.error, _fix(report.error, is_stock))
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.seconds.items())
    found = (
        f"{report.num_bytes / _MIB:.1f} MiB in {sum(report.seconds.values()):.2f} s ({phases}), proven by "
        f"{report.proof}; the server holds the checkpoint's weights"
    )
    if report.proof == "canary" and not is_stock:
        return warning(found, "write rollout.sync.proof: auto, so that checksums prove the weights", report)
    limit = " (shows only that nothing is grossly wrong: a stock server has no checksums)" if is_stock else ""
    return ok(found + limit, report)


def _fix(error: str, is_stock: bool) -> str:
    known: Sequence[tuple[str, str]] = (
        ("same tensors", "start the server with the learner's model"),
        ("another run", "give every run a server of its own, or wait until the other one is over"),
        (
            "weight group",
            "mend rollout.servers[].group_host, group_bind or group_port, or the network, as told above",
        ),
        ("no checksums", "write rollout.sync.proof: auto"),
        ("other tokens", "start the server with the learner's model, dtype and template, and restart it"),
        ("only a canary", "write rollout.sync.proof: auto"),
        ("canary alone shows nothing", "write rollout.sync.proof: auto"),
    )
    fix = next((remedy for mark, remedy in known if mark in error), "")
    log = "restart the server and read its log" if is_stock else "read the server's log"
    return fix or f"{log}: the round names what it was doing"
