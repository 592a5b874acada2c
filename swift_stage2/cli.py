"""``swift-stage2 COMMAND``: finds the command, imports only what it needs, turns a user's mistake into one line.

Exit status: 0 done, 2 the user's mistake, 3 a run that lost its channel B, 70 a weight push that hung, 130 interrupted,
else the command's own.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from swift_stage2 import __version__
from swift_stage2.errors import EXIT_USER_MISTAKE, UserError
from swift_stage2.runtime.output import exit_at_once, print_error
from swift_stage2.runtime.parser import CommandParser, real_number, whole_number

_HANG = 70
_INTERRUPTED = 130
_CHECKOUT = Path(__file__).parents[1]
_LEARNER_STATUSES = (
    "0 trained to the end; 1 the run failed; 3 channel B starved (stage2_ab.starvation.action); "
    "70 a weight push hung"
)

# Commands with a parser of their own: module of this package with main(argv), what it is for.
_OWN_PARSER = {
    "rollout": ("rollout_server.command_line", "serve rollouts of a model over HTTP"),
    "merge": ("rollout_server.merge_command", "batch the ranks' calls in front of a stock rollout server"),
    "demo": ("demo.run", "train a tiny model on both channels, on this machine"),
    "doctor": ("checks.doctor", "check everything that can be known before training"),
    "import": ("data.import_command", "turn a COCO, YOLO or VOC data set into rows"),
    "export": ("data.export_command", "turn predictions or rows into COCO's JSON"),
    "data": ("data.survey", "check every row of a data set, without a model"),
    "evaluate": ("evaluate.command", "detection metrics of a model, a running server or predictions"),
    "correct": ("evaluate.correct_command", "order the objects of rows as a model finds them, for channel A"),
    "report": ("report.command", "tell how a run went, on one page: speed, quality, what was lost"),
    "rollouts": ("report.rollouts_command", "print finished rollouts, also while the run goes on"),
    "init": ("starter_config", "write the YAML of a job for data, model and GPUs"),
    "replay": ("replay.command", "take the steps of a recorded run again, without servers"),
}
# Commands of a checkout alone: package that is run as a program, what it is for.
_FROM_CHECKOUT = {
    "bench": ("benchmarks", "measure speed and learning, from a checkout"),
    "gpu-check": ("benchmarks.gpu_check", "run what only a GPU can show, from a checkout"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    return ended(command, lambda: _run(arguments))


def ended(command: str, work: Callable[[], int]) -> int:
    """The exit status of ``work``; what a user did wrong is told in one line that names ``command``."""
    try:
        return work()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except UserError as exc:
        print_error(command, exc)
        return EXIT_USER_MISTAKE
    except BrokenPipeError:  # whoever read what is printed has gone, as `head` does
        _print_no_more()
        return 1


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in _FROM_CHECKOUT:
        _become_benchmarks(*arguments)
    if arguments and arguments[0] in _OWN_PARSER:
        module, _ = _OWN_PARSER[arguments[0]]
        return int(importlib.import_module(f"swift_stage2.{module}").main(arguments[1:]))
    options = parser().parse_args(arguments)
    if options.command == "completion":
        print(importlib.import_module("shtab").complete(parser(), options.shell))
        return 0
    if options.command == "launch":
        from swift_stage2.launch.launcher import launch
        from swift_stage2.launch.plan import LaunchPart

        if options.step_seconds is not None and options.part != LaunchPart.CHECK:
            raise UserError("--step-seconds is for a check", got="no --check", remedy="add it")
        return launch(
            options.config,
            nproc_per_node=options.nproc_per_node,
            show=_show,
            resume=options.resume,
            verbose=options.verbose,
            part=LaunchPart(options.part),
            node_rank=options.node_rank,
            check_options=() if options.step_seconds is None else (f"--step-seconds={options.step_seconds}",),
        )
    return _train(options.config, resume=options.resume)


def _become_benchmarks(command: str, *arguments: str) -> NoReturn:
    """Replaces this process by a program of the checkout's benchmarks: signals and exit status are then its own."""
    if not (_CHECKOUT / "benchmarks" / "benches.py").is_file():
        raise UserError(
            "benches are in benchmarks/ of a checkout and not in the installed package",
            got=str(_CHECKOUT),
            remedy=f"run scripts/setup and .venv/bin/swift-stage2 {command} in a checkout",
        )
    path = os.pathsep.join(filter(None, (str(_CHECKOUT), os.environ.get("PYTHONPATH"))))
    program, _ = _FROM_CHECKOUT[command]
    # The directory that the user is in may hold a package of that name, too.
    argv = (sys.executable, "-m", program, *arguments)
    os.execve(sys.executable, argv, os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"})


def parser() -> argparse.ArgumentParser:
    """Of all commands; what has a parser of its own stands in it by name and purpose alone."""
    parser = CommandParser(
        prog="swift-stage2",
        exit_statuses="0 done; else the command's own, see COMMAND --help",
        description="Stage-2 training for detection VLMs.",
    )
    parser.add_argument("--version", action="version", version=f"swift-stage2 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands in a shell",
        description="swift-stage2 completion bash > ~/.swift-stage2.sh; `source ~/.swift-stage2.sh` in ~/.bashrc",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    train = commands.add_parser(
        "train",
        help="train one rank; torchrun starts it: torchrun … -m swift_stage2 train",
        exit_statuses=_LEARNER_STATUSES,
    )
    launch = commands.add_parser(
        "launch",
        help="start servers and learner, and end them together",
        exit_statuses=f"{_LEARNER_STATUSES}; 128 + n ended by signal n",
    )
    for option, kind, meaning in (
        ("--nproc-per-node", whole_number(1), "learner ranks (default: launch.learner.nproc_per_node)"),
        ("--node-rank", int, "which of the learner's hosts this is (default: launch.learner.node_rank)"),
    ):
        launch.add_argument(option, type=kind, metavar="N", help=meaning)
    parts = launch.add_mutually_exclusive_group()
    for part, meaning in (
        ("servers", "the servers whose base_url is this machine's; the learner is launched elsewhere"),
        ("learner", "this machine's ranks of the learner; the servers are launched elsewhere"),
    ):
        text = f"only {meaning}"
        parts.add_argument(
            f"--{part}-only", dest="part", action="store_const", const=part, default="all", help=text
        )
    text = "start the servers, run doctor --live, end everything; the exit status is the doctor's"
    parts.add_argument("--check", dest="part", action="store_const", const="check", help=text)
    seconds, text = real_number("a number of seconds above 0"), "with --check: the same of doctor"
    launch.add_argument("--step-seconds", type=seconds, metavar="S", help=text)
    launch.add_argument("--verbose", action="store_true", help="show every line that servers and ranks write")
    for command in (train, launch):
        command.add_argument("config", metavar="CONFIG.yaml")
        resume = "go on from the last whole checkpoint of the run in swift.output_dir"
        command.add_argument("--resume", action="store_true", help=resume)
    for name, (_, purpose) in (_OWN_PARSER | _FROM_CHECKOUT).items():
        commands.add_parser(name, help=purpose, add_help=False)
    return parser


def _train(config_path: str, *, resume: bool) -> int:
    from swift_stage2.runtime.environment import end_with_torchrun

    end_with_torchrun(os.environ)  # before the slow imports
    from swift_stage2.checks.checks import CheckStage, run_checks
    from swift_stage2.config import load_config
    from swift_stage2.launch.rank import as_rank, train_rank

    def work() -> int:
        # A mistake is told before the slow imports.
        config = load_config(config_path)
        run_checks(config, CheckStage(rank_environment=os.environ, addresses=True, files=True))
        return train_rank(config, resume=resume)

    status = as_rank("train", work)
    if status == _HANG:
        # A thread is stuck in a transfer; a tidy interpreter shutdown could wait for it for ever.
        exit_at_once(status)
    return status


def _show(line: str) -> None:
    """A closed terminal or pipe ends the show, not the run."""
    try:
        print(line, flush=True)
    except OSError:
        _print_no_more()


def _print_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
