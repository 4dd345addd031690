"""Studies of many runs: sweeps, the papers, audits."""
