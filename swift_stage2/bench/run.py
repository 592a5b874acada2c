"""``swift-stage2 bench NAME …``: which measurement a command line asks for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from swift_stage2.errors import ChildFailed
from swift_stage2.terminal.output import print_error
from swift_stage2.terminal.parser import CommandParser

BENCHES = {
    "all": (
        "swift_stage2.bench.all_benches",
        "every bench one after the other, and a page of what they found",
    ),
    "attacks": (
        "swift_stage2.bench.attacks.run",
        "what hostile or broken peers may send, against the real parts: is all of it withstood?",
    ),
    "faults": (
        "swift_stage2.bench.faults.run",
        "a server broken in every way under a real job (vLLM with --server stock or vllm)",
    ),
    "interference": (
        "swift_stage2.bench.interference",
        "what channel B's pipeline costs the steps of channel A beside it",
    ),
    "kills": (
        "swift_stage2.bench.faults.kills",
        "a run killed at random points and resumed: is its ledger exact?",
    ),
    "learning": ("swift_stage2.bench.learning", "A alone against a share of B: F1 on held-out scenes"),
    "merge": (
        "swift_stage2.bench.merge",
        "requests/s at several client ranks: stock, stock merged, ours (vLLM)",
    ),
    "outage": (
        "swift_stage2.bench.faults.outage",
        "the only server away for 200 steps: channel A's steps before, during and after",
    ),
    "overhead": ("swift_stage2.bench.overhead", "b_ratio 0 against plain swift sft: step times"),
    "overlap": (
        "swift_stage2.bench.overlap",
        "asynchronous against the same work done inline: how much of the bound is reached?",
    ),
    "peer": (
        "swift_stage2.bench.peer",
        "how idle is the learner? ours and ms-swift's own asynchronous GRPO beside the same server (vLLM)",
    ),
    "pending": (
        "swift_stage2.bench.pending",
        "how long sync rounds wait for rollouts, with aborts and without",
    ),
    "plan": (
        "swift_stage2.bench.plan",
        "what it costs to plan a step at 2 to 16 ranks, against a bare all-reduce",
    ),
    "preprocess": (
        "swift_stage2.bench.preprocess",
        "samples/s of parse, match, target, encode and pack by number of objects",
    ),
    "soak": (
        "swift_stage2.bench.faults.soak",
        "a long run under random faults: is anything lost, does anything grow?",
    ),
    "staleness": (
        "swift_stage2.bench.staleness",
        "F1 against the versions between a rollout's making and its training",
    ),
    "sync": (
        "swift_stage2.bench.sync",
        "a sync round against a raw broadcast of the same bytes (vLLM, unless --servers transformers)",
    ),
    "wrong-inputs": (
        "swift_stage2.bench.wrong_inputs.run",
        "every kind of wrong input, given to the real commands: is each told in one line?",
    ),
}
_FAILED = 1
_DESCRIPTION = (
    "Measure speed, learning, and what faults cost. Exit status 0: everything was measured and nothing was lost; a "
    "missed budget is told in the table. NAME --help tells the options, and of most how long they take."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one bench; returns 0 when it measured everything, 1 when a process of its own failed.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = CommandParser(prog="swift-stage2 bench", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, (_, purpose) in BENCHES.items():
        commands.add_parser(name, help=purpose, add_help=False)
    # Every bench has a parser of its own for what follows its name.
    module, _ = BENCHES[parser.parse_args(arguments[:1]).bench]
    try:
        return int(importlib.import_module(module).main(arguments[1:]))
    except ChildFailed as error:
        print_error("bench", error)
        return _FAILED
