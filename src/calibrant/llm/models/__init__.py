"""Language models: loading them, the parts that calibration needs, fingerprints, and services."""
