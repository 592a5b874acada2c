"""One rank's decisions at every optimizer step: ``learner`` plans it, ``versions`` begins new weights beside it."""

from swift_stage2.learner.learner import Learner, StepDecision
from swift_stage2.learner.parts import ChannelB

__all__ = ["ChannelB", "Learner", "StepDecision"]
