"""Calibration where people already look: experiment trackers and the callbacks of trainers.

Each module is for one library and is imported by name, such as
``from calibrant.integrations.wandb import log_calibration``. Every tracker has a
``log_calibration``, and all of them use the same names: ``calibration/ece``,
``calibration/ece_low``, ``calibration/ece_high`` and so on.
"""
