"""Weights on their way to servers: export, checksums, transports, push and proof, the sync round."""
