"""``swift-stage2 bench outage``: the only server is away for 200 steps; what do channel A's steps cost meanwhile?

Learner and server run on disjoint cores where there are two, as they run on disjoint devices in earnest: else the
steps would get faster while nobody generates beside them. With a stand-in that computes nothing the learner has all
cores, and with fewer ranks than cores its pipelines have one of their own. Each cycle is: steps with the server,
kill -9, steps without it, a new server, a proven round, steps with it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.faults import row_data
from benchmarks.faults.accounting import count_samples, gaps
from benchmarks.faults.bench_options import bench_parser, refuse_below
from benchmarks.faults.outage_phases import OutageReport, Phase, Ratio, compare_phases
from benchmarks.faults.run import FaultBench
from benchmarks.faults.scene import Scene
from benchmarks.faults.training_job import NUM_RANKS, JobSettings, TrainingJob
from benchmarks.servers import server_arguments
from benchmarks.stand_in_job import stand_in_arguments
from swift_stage2.config import Proof
from swift_stage2.demo.demo_config import STAGE1, free_ports
from swift_stage2.errors import UserError
from swift_stage2.launch.cores import split_cores, started_on
from swift_stage2.output_directory import claim_directory
from swift_stage2.telemetry.ledger_account import RunAccount

_FAILED = 1
_STEPS = 200
_FEWEST_STEPS = 10  # that a median can be told of
_B_RATIO = 0.25
_SETTLING_STEPS = 10  # after the start, a kill or a proof, before steps are compared
_SLOWEST_STEP_S = 10.0
_LONGEST_WAIT_S = 1.0
_NUM_PHASES = 3
_LONGEST_LATENCY_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cycles, prints the table and writes ``outage.md`` and ``.json``.

    Returns 0 when the account balances, nothing is left, no step of an outage waited a second longer than before it,
    and channel B ran again after every outage. How much slower a step was is printed and left to who reads it.

    Raises:
        UserError: an option is out of range, a package is missing, or the output directory cannot be used.
        ChildFailed: the run did not go on, or B did not come back.
        KeyboardInterrupt: a signal asked for the end.
    """
    options = _parse(argv)
    stand_in = options.stand_in_latency_s is not None
    if not stand_in:
        server_arguments(options.server, STAGE1, 0, 1)  # refuses a server that is not installed
    directory = claim_directory(options.output, keep=options.keep)
    started = time.monotonic()
    rows = row_data.write_rows(directory)
    program = partial(stand_in_arguments, rows, options.stand_in_latency_s) if stand_in else None
    # A stand-in needs no core to itself, and a pipeline one beside its rank's.
    every_core = set(os.sched_getaffinity(0))
    learner_cores, server_cores = (every_core, every_core) if stand_in else split_cores()
    with FaultBench(options.server, directory, program) as bench, started_on(server_cores):
        reports, account, exit_status = _run(bench, directory, rows, learner_cores, options)
        left = bench.end()
    samples = count_samples(account)
    facts = {
        "server": "stand-in" if stand_in else str(options.server),
        "stand_in_latency_s": options.stand_in_latency_s,
        "steps": options.steps,
        "ranks": options.ranks,
        "b_ratio": options.b_ratio,
        "learner_cores": sorted(learner_cores),
        "server_cores": sorted(server_cores),
        "seconds": time.monotonic() - started,
        "exit_status": exit_status,
        "left_at_the_end": left,
        "samples": asdict(samples),
        "outages": [asdict(report) for report in reports],
    }
    (directory / "outage.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    table = markdown(reports)
    (directory / "outage.md").write_text(table, encoding="utf-8")
    print(table)
    print(
        f"[bench] {samples.drawn} drawn = {samples.trained} trained + {samples.quarantined} quarantined + "
        f"{samples.in_hand} in hand; {len(samples.broken_rules)} rules broken; {left} things left; "
        f"took {facts['seconds']:.0f} s; {directory / 'outage.json'}"
    )
    is_sound = account.is_balanced and not left and exit_status == 0 and not any(map(is_bad, reports))
    return 0 if is_sound else _FAILED


def _run(
    bench: FaultBench, directory: Path, rows: Path, learner_cores: set[int], options: argparse.Namespace
) -> tuple[list[OutageReport], RunAccount, int]:
    server = bench.ready_server()
    # The stand-in answers no canary as a model does; what it holds is proven tensor by tensor.
    proof = Proof.AUTO if options.stand_in_latency_s is None else Proof.CHECKSUM
    (group_port,) = free_ports(1)
    with ExitStack() as stack:
        with started_on(learner_cores):
            job = bench.start_job(
                "outage",
                directory / "job",
                rows,
                (server.port, group_port),
                JobSettings(num_ranks=options.ranks, b_ratio=options.b_ratio, proof=proof),
            )
        stack.callback(job.end)
        Scene(server, job, server.switches, None).warm_up()
        phases = [_train(job, options.steps)]
        for cycle in range(options.cycles):
            scene = Scene(server, job, server.switches, None)
            scene.mark_fault()
            scene.kill_server()
            scene.wait_until_noticed()
            phases.append(_train(job, options.steps))
            scene.start_server()
            scene.mark_healed()
            scene.wait_until_healed()
            phases.append(_train(job, options.steps))
            print(f"[bench] outage {cycle} of {options.cycles} is over", flush=True)
        status = job.stop()
    every = gaps(job.of_kind("step"))
    reports = [compare_phases(every, *phases[2 * n : 2 * n + _NUM_PHASES]) for n in range(options.cycles)]
    return reports, job.account(), status


def _train(job: TrainingJob, num_a_steps: int) -> Phase:
    """Some steps to settle, then as many of channel A as asked for."""
    job.wait_for_steps(_SETTLING_STEPS)
    start, first = time.time(), job.num_steps

    def num_run() -> int:
        return sum(step["channel"] == "A" for step in job.of_kind("step")[first:])

    job.wait_for(
        lambda: num_run() >= num_a_steps, f"{num_a_steps} steps of channel A", num_a_steps * _SLOWEST_STEP_S
    )
    return Phase(start, time.time())


def is_bad(report: OutageReport) -> bool:
    """Whether somebody waited for the dead server, or channel B did not come back."""
    return report.longest_wait_s > _LONGEST_WAIT_S or report.b_steps[-1] == 0


def markdown(reports: Sequence[OutageReport]) -> str:
    """The table: one line per outage, and their medians."""
    lines = [
        "| outage | A-steps before, during, after | median before, s | during / before | after / before | "
        "during / both | longest wait, s | B steps before, during, after |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, report in enumerate(reports):
        lines.append(
            f"| {number} | {report.num_before}, {report.num_during}, {report.num_after} | "
            f"{report.median_before_s:.4f} | {_words(report.during)} | {_words(report.after)} | "
            f"{_words(report.during_to_both)} | {report.longest_wait_s:.3f} | "
            f"{', '.join(map(str, report.b_steps))} |"
        )
    medians = [
        statistics.median(ratio.value for ratio in ratios)
        for ratios in zip(*((r.during, r.after, r.during_to_both) for r in reports), strict=True)
    ]
    lines.append(f"| median | | | {medians[0]:.3f} | {medians[1]:.3f} | {medians[2]:.3f} | | |")
    return "\n".join(lines) + "\n"


def _words(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(
        "outage",
        "Take the only server away for many steps and compare channel A's steps. Takes roughly 10 minutes on two cores "
        "with the transformers server, more with the others. Exit status 0: the account balances, nothing is left, no "
        "step waited a second longer than before an outage, and channel B ran again after each.",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=_STEPS,
        help="channel-A steps per phase, at least 10 (default %(default)s)",
    )
    parser.add_argument("--cycles", type=int, default=3, help="outages, at least 1 (default %(default)s)")
    parser.add_argument(
        "--b-ratio",
        type=float,
        default=_B_RATIO,
        help="share of channel B, above 0 and below 1; its pipeline's own work shares the learner's cores "
        "(default %(default)s)",
    )
    parser.add_argument("--ranks", type=int, default=NUM_RANKS, help="of the learner (default %(default)s)")
    parser.add_argument(
        "--stand-in-latency-s",
        type=float,
        metavar="S",
        help="in place of --server one that computes nothing and waits about so long: where cores are few, a server "
        "that computes slows the learner, and steps get faster when it dies",
    )
    options = parser.parse_args(argv)
    if (latency_s := options.stand_in_latency_s) is not None and not 0 < latency_s <= _LONGEST_LATENCY_S:
        raise UserError(
            f"--stand-in-latency-s must be above 0 and at most {_LONGEST_LATENCY_S:g}, got {latency_s}; write 0.5"
        )
    if not 0 < options.b_ratio < 1:
        raise UserError(f"--b-ratio must be above 0 and below 1, got {options.b_ratio}; write {_B_RATIO}")
    refuse_below("ranks", options.ranks, 1, NUM_RANKS)
    refuse_below("steps", options.steps, _FEWEST_STEPS, _STEPS)
    refuse_below("cycles", options.cycles, 1, 1)
    return options


if __name__ == "__main__":
    sys.exit(main())
