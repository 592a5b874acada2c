"""Pure decisions of one optimizer step: no thread, no socket, no collective, no torch.

``bresenham`` wants, ``feasibility_gate`` allows, ``step_plan`` is the outcome; ``version_clock``
says what is fresh; ``pacing`` says how many packs to make now; ``starvation`` and
``truncation_guard`` watch. The same inputs give the same answer on every rank.
"""
