"""The decisions of one rank at every optimizer step: ``learner`` plans it, ``rounds`` drives sync rounds beside it."""

from swift_stage2.learner.learner import Learner, StepDecision
from swift_stage2.learner.parts import ChannelB

__all__ = ["ChannelB", "Learner", "StepDecision"]
