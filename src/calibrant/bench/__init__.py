"""Training benchmarks: networks trained with different losses, and their calibration."""
