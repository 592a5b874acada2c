"""Stage-2 training for detection VLMs: train on the model's own answers without waiting for them.

See ``docs/design/`` for the architecture; ``channel_b/__init__.py`` draws the background pipeline.
"""

__version__ = "0.1.0"
