"""Language models: loading them, the parts that calibration needs, and their fingerprints."""
