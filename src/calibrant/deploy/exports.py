"""Export formats by file suffix."""

from __future__ import annotations

from collections.abc import Callable

from calibrant.deploy.onnx import export_onnx
from calibrant.deploy.torch_export import export_program

EXPORTS: dict[str, Callable[..., float]] = {".onnx": export_onnx, ".pt2": export_program}
"""How each suffix is written."""
