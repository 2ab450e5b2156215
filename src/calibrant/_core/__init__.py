"""Building blocks without knowledge of calibration."""
