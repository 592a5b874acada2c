"""The plugin: ``swift sft --external_plugins swift_stage2/trainer.py`` trains with ``Stage2Trainer``.

The environment variable SWIFT_STAGE2_CONFIG names the YAML. Loading this file is what changes ms-swift; a program that
wants the class imports it from ``swift_stage2``, and nothing changes.
"""

from swift_stage2 import Stage2Trainer as Stage2Trainer
from swift_stage2.training.stage2_trainer import register_trainer

register_trainer()
