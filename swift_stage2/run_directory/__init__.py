"""A run's directory: one run at a time, never over another, checkpoints whole, resumed exactly."""
