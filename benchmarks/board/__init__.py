"""What `benchmarks.device` is made of: a case, its two children, starting, what is installed, the report."""
