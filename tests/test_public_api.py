"""Programs import the public names from ``swift_stage2``, and importing alone changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from real_model import STAGE1
from sft_run import build_trainer, channel_a_alone, our_trainer

import swift_stage2
from swift_stage2 import Stage2Trainer
from swift_stage2.demo import tiny_template
from swift_stage2.errors import ConfigError
from swift_stage2.training.stage2_trainer import CONFIG_VARIABLE

PLUGIN = Path(swift_stage2.__file__).parent / "trainer.py"


def python(code: str, **environment: str) -> str:
    done = run_python("-c", code, variables=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_package_loads_nothing_heavy_until_a_name_is_used() -> None:
    loaded = python(
        "import sys, swift_stage2\n"
        "heavy = {'torch', 'swift', 'numpy', 'transformers', 'yaml', 'swift_stage2.config'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "from swift_stage2 import load_config, Task, register_task\n"
        "print(sorted({'torch', 'swift', 'transformers'} & set(sys.modules)))\n"
    )
    assert loaded.split("\n")[:2] == ["[]", "[]"]


def test_every_public_name_is_there_and_no_other() -> None:
    for name in swift_stage2.__all__:
        assert getattr(swift_stage2, name).__name__ == name
        assert name in dir(swift_stage2)
    with pytest.raises(AttributeError, match="module 'swift_stage2' has no attribute 'Stage3Trainer'"):
        swift_stage2.Stage3Trainer  # noqa: B018


@pytest.mark.slow
def test_importing_the_trainer_changes_nothing_and_ms_swifts_own_command_trains_with_the_plugin_and_the_variable(
    tmp_path: Path, rows_file: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("stage2_ab: {schedule: {b_ratio: 0}}\n")
    arguments: dict[str, Any] = {
        "model": STAGE1,
        "model_type": "stage2_tiny_vl",
        "template": "stage2_tiny_vl",
        "dataset": rows_file,
        "output_dir": tmp_path / "out",
        "add_version": "false",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "use_cpu": "true",
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "split_dataset_ratio": 0,
        "load_from_cache_file": "false",
        "report_to": "none",
    }
    argv = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    argv += ["--external_plugins", str(tiny_template.__file__), str(PLUGIN)]
    told = python(  # ``swift sft`` itself, on a machine whose torchvision fits another torch
        "from swift_stage2.compat import declare_operators\n"
        "declare_operators()\n"
        "from swift_stage2 import Stage2Trainer\n"
        "import signal, swift_stage2.training.sft, swift_stage2.replay.rank\n"
        "from swift.trainers import TrainerFactory\n"
        "print('imported', TrainerFactory.TRAINER_MAPPING['causal_lm'], signal.getsignal(signal.SIGTERM).name)\n"
        "from swift.pipelines import sft_main\n"
        f"sft_main({argv!r})\n"
        "class Arguments: task_type = 'causal_lm'\n"
        "print('trained', TrainerFactory.get_trainer_cls(Arguments) is Stage2Trainer)\n",
        **{CONFIG_VARIABLE: str(config)},
    ).splitlines()
    assert "imported swift.trainers.Seq2SeqTrainer SIG_DFL" in told
    assert "trained True" in told
    assert (tmp_path / "out" / "events" / "rank0.jsonl").read_text().count('"kind":"step"') == 2


def test_the_configuration_is_an_argument_and_the_variable_only_its_fallback(
    tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "absent.yaml"))
    config = channel_a_alone()
    trainer = our_trainer(rows_file, tmp_path, config)
    assert trainer.stage2_config is config
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        build_trainer(rows_file, tmp_path, trainer=Stage2Trainer)
    monkeypatch.delenv(CONFIG_VARIABLE)
    with pytest.raises(ConfigError, match=f"needs a configuration, got none; .*{CONFIG_VARIABLE}"):
        build_trainer(rows_file, tmp_path, trainer=Stage2Trainer)
