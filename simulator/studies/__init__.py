"""What is asked of many runs: sweeps, the papers, audits."""
