"""Checksums for the unmodified ``swift rollout``, whose weights a learner then proves as those of our own server.

prove_weights   the file for its ``--external_plugins``   PLUGIN
└── sums_server   the worker extension by name (our engine's), one route, one answer of all engines
"""

from __future__ import annotations

from pathlib import Path

PLUGIN = Path(__file__).with_name("prove_weights.py")
