"""``swift-stage2 bench NAME …``: which measurement a command line asks for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from swift_stage2.command_parser import CommandParser
from swift_stage2.error_line import print_error
from swift_stage2.errors import ChildFailed

BENCHES = {
    "all": (
        "benchmarks.all_benches",
        "every bench one after the other, and a page of what they found",
    ),
    "attacks": (
        "benchmarks.attacks.run",
        "what hostile or broken peers may send, against the real parts: is all of it withstood?",
    ),
    "faults": (
        "benchmarks.faults.run",
        "a server broken in every way under a real job (vLLM with --server stock or vllm)",
    ),
    "interference": (
        "benchmarks.interference",
        "what channel B's pipeline costs the steps of channel A beside it",
    ),
    "kills": (
        "benchmarks.faults.kills",
        "a run killed at random points and resumed: is its ledger exact?",
    ),
    "learning": ("benchmarks.learning", "A alone against a share of B: F1 on held-out scenes"),
    "merge": (
        "benchmarks.merge",
        "requests/s at several client ranks: stock, stock merged, ours (vLLM)",
    ),
    "outage": (
        "benchmarks.faults.outage",
        "the only server away for 200 steps: channel A's steps before, during and after",
    ),
    "overhead": ("benchmarks.overhead", "b_ratio 0 against plain swift sft: step times"),
    "overlap": (
        "benchmarks.overlap",
        "asynchronous against the same work done inline: how much of the bound is reached?",
    ),
    "peer": (
        "benchmarks.peer",
        "how idle is the learner? ours and ms-swift's own asynchronous GRPO beside the same server (vLLM)",
    ),
    "pending": (
        "benchmarks.pending",
        "how long sync rounds wait for rollouts, with aborts and without",
    ),
    "plan": (
        "benchmarks.plan",
        "what it costs to plan a step at 2 to 16 ranks, against a bare all-reduce",
    ),
    "preprocess": (
        "benchmarks.preprocess",
        "samples/s of parse, match, target, encode and pack by number of objects",
    ),
    "soak": (
        "benchmarks.faults.soak",
        "a long run under random faults: is anything lost, does anything grow?",
    ),
    "staleness": (
        "benchmarks.staleness",
        "F1 against the versions between a rollout's making and its training",
    ),
    "sync": (
        "benchmarks.sync",
        "a sync round against a raw broadcast of the same bytes (vLLM, unless --servers transformers)",
    ),
    "wrong-inputs": (
        "benchmarks.wrong_inputs.run",
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
