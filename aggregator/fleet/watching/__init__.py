"""The state of a fleet: columns of its boards, problems, the terminal, metrics and Home Assistant."""
