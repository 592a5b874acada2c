"""Pure decisions of one optimizer step: no thread, no socket, no collective, no torch.

``bresenham`` wants, ``feasibility_gate`` allows, ``step_plan`` is the outcome; ``version_clock`` says what is fresh;
``version_schedule`` and ``evaluation_schedule`` say what is due, ``server_life`` where a server stands; ``horizon``
says how many packs to make now; ``watches`` tell of starvation and truncation. The same inputs give the same answer on
every rank.
"""
