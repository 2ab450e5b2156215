"""The identity of a fitted calibrator."""

from __future__ import annotations

import hashlib
import json

from torch import Tensor

from calibrant.calibrators.base import Calibrator


def calibrator_fingerprint(calibrator: Calibrator) -> str:
    """Return the class of a fitted calibrator and a digest of what it has learned."""
    config = json.dumps(calibrator.config(), sort_keys=True, default=lambda part: str(type(part)))
    digest = hashlib.sha256(config.encode() + repr(calibrator.class_names_).encode())
    for name, value in sorted(calibrator.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(name.encode() + value.detach().cpu().double().numpy().tobytes())
        else:  # the choice of Auto
            digest.update(f"{name}{json.dumps(value)}".encode())
    return f"{type(calibrator).__name__} {digest.hexdigest()[:12]}"
