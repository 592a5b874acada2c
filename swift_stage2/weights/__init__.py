"""Weights on their way to servers: export, snapshot, checksums, transports, pushes and their proof."""
