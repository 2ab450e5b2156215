"""Training benchmarks."""
