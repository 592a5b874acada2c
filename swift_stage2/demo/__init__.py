"""The demo: scenes with known boxes, a tiny model that can learn them, and its stage-1 checkpoint."""
