"""HTTP between learner and servers: wire records, calls with one deadline, sessions, limits, listeners."""
