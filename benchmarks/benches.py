"""Every bench by its name: what it asks, which options it has, how long it takes. Imports none of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.command import Bench, Option

FAULTS = (
    "kill_server",
    "kill_in_round",
    "kill_between_installs",
    "late_reply",
    "stop_rank",
    "kill_publisher",
)
"""Of the fault table."""
PARTS = ("table", "kills", "outage", "soak")
"""Of the bench faults."""
_SERVERS = ("transformers", "vllm", "stock")
_OBJECTIVES = ("corrected_target", "grpo", "mixed")
_REPEATS = Option("repeats", 3, "repetitions", least=1)
_LATENCY = Option("latency-s", 0.5, "mean wait of a rollout from the stand-in", least=0.001, most=10)
_STEPS = Option("steps", 72, "optimizer steps per run, the first 8 not counted", least=16)

_ALL = (
    Bench(
        name="overlap",
        purpose="asynchronous against the same work done inline: how much of the bound is reached",
        detail="The Amdahl bound is of the inline run's own stage times.",
        takes="about 10 minutes",
        options=(_LATENCY, _STEPS, _REPEATS),
    ),
    Bench(
        name="peer",
        purpose="how idle the learner is: ours and ms-swift's own asynchronous GRPO beside the same server (vLLM)",
        detail="Asynchronous (async_generate) each, beside the same stand-in, and inline where no option has several "
        "values: learner idle share, and steps/s against each learner's own bound. Needs vLLM, with whose "
        "installation ms-swift's client comes.",
        takes="about 20 minutes",
        options=(
            Option(
                "objective",
                ["corrected_target"],
                "of ours; grpo trains rollouts by the same reward as GRPO",
                choices=_OBJECTIVES[:2],
            ),
            _LATENCY,
            Option("b-ratio", 1.0, "share of our steps that want rollouts", least=0.01, most=1),
            Option(
                "slow-share", [0.0], "shares of the rollouts that wait ten times as long", least=0, most=1
            ),
            Option("sync-every-steps", [4], "least steps between two versions of ours", least=1),
            Option("server", "stand-in", "which answers; vllm computes", choices=("stand-in", "vllm")),
            Option("half-as-fast", False, "ours alone: beside one server, one half as fast, and both"),
            Option("max-inflight", 64, "rollouts that each of our servers may have at once", least=1),
            _STEPS,
            _REPEATS,
        ),
    ),
    Bench(
        name="sync",
        purpose="a sync round: the learner's pause and the time to the proof (vLLM, unless --servers transformers)",
        detail="Against a bare copy of the same bytes; servers of ours over shared memory and, of "
        "transformers, TCP; stock ones (unmodified swift rollout) with and without the plugin that proves.",
        takes="about a minute with the transformers server and up to 100 MiB, else more",
        options=(
            Option("mib", [1, 100, 1024], "bytes of weights, MiB", least=1),
            Option("servers", [*_SERVERS], "servers", choices=_SERVERS),
            Option("repeats", 5, "rounds per system and size", least=1),
        ),
    ),
    Bench(
        name="learning",
        purpose="A alone, on answers that were corrected before, or with a share of B: F1 on held-out scenes",
        detail="Arms: a; once and renewN, whose rows stage 1, or every N steps the newest weights, put in the order in "
        "which they find objects, greedily; bR, bR/grpo and bR/mixed with a share R of inline B steps, sampled; first, "
        "firstN: b1 with rollouts of stage 1, or new weights every N steps. a@1400: also scored after 1400 steps.",
        takes="about 5 minutes per arm and seed",
        succeeds="everything was trained and scored",
        options=(
            Option("arms", ["a", "b0.3"], "what is compared", metavar="ARM"),
            Option("steps", 200, "optimizer steps", least=1),
            Option("seeds", 1, "seeds 0, 1, …", least=1),
            Option("kind", "shapes", "what is in the scenes", choices=("shapes", "digits")),
            Option("learning-rate", 1e-4, "of every arm", least=1e-9),
            Option("model", None, "stage 1 (default the demo's)", kind=Path, metavar="DIR"),
            Option("core-seconds", 0.0, "also compares scores that took about as many", least=0),
            Option("results", None, "keeps scores (default in the output)", kind=Path, metavar="FILE"),
        ),
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
            Option("lags", [0, 2, 8], "versions", least=0),
        ),
    ),
    Bench(
        name="faults",
        module="faults.bench",
        purpose="what faults cost, and whether anything is lost: a real job that is broken in every way",
        detail="table: every fault in a job of its own; kills: a run killed at random points and resumed; outage: the "
        "only server away for --steps steps of channel A; soak: --steps steps under random faults. Servers stock "
        "(unmodified swift rollout) and vllm (ours) need vLLM.",
        takes="15 to 30 minutes",
        succeeds="every account balanced, nothing hung, nothing was left",
        options=(
            Option("part", "table", "what is done", choices=PARTS),
            Option("server", "transformers", "which answers", choices=_SERVERS),
            Option("faults", [*FAULTS], "of the table", choices=FAULTS),
            Option("phases", False, "the server sleeps while the learner trains"),
            Option("points", 50, "kills", least=1),
            Option("steps", 200, "of an outage, or of the soak, which wants 2000", least=10),
            Option("cycles", 3, "outages", least=1),
            Option("seed", 0, "of kills and of the soak"),
        ),
    ),
    Bench(
        name="overhead",
        purpose="b_ratio 0 against plain swift sft: step times",
        takes="about 4 minutes",
        options=(
            Option("steps", 60, "optimizer steps per arm", least=7),
            Option("repeats", 3, "pairs of runs", least=1),
            Option("ranks", 2, "torchrun ranks", least=1),
            Option(
                "rows", "padded", "how both put rows together", choices=("padded", "padding_free", "packing")
            ),
        ),
    ),
    Bench(
        name="plan",
        purpose="what it costs to plan a step at 2 to 16 ranks, against a bare all-reduce",
        detail="A plan is: reserve, agree, hand over; the all-reduce is of the same size.",
        takes="about 5 minutes",
        options=(
            Option("ranks", [2, 4, 8, 16], "numbers of ranks", least=2),
            Option("repeats", 200, "pairs per number of ranks", least=2),
        ),
    ),
    Bench(
        name="preprocess",
        purpose="samples/s of parse, match and target, and the match against its bare parts",
        takes="about a minute",
        options=(
            Option("objects", [1, 20, 100, 500], "objects per sample", least=1),
            Option("crowd", 500, "boxes per side of the match", least=1),
            Option("repeats", 30, "repetitions", least=2),
        ),
    ),
)
BENCHES = {bench.name: bench for bench in _ALL}
