"""Post-hoc calibrators: fitted on held-out logits, they map logits to calibrated logits.

The classes of :data:`calibrant.calibrators.registry.CALIBRATORS`, ``PARTS`` and ``TAG_CALIBRATORS``
can be imported from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from calibrant._core.messages import no_attribute

if TYPE_CHECKING:  # what type checkers see; at run time the registry finds the classes
    from calibrant.calibrators.affine import *  # noqa: F403
    from calibrant.calibrators.auto import *  # noqa: F403
    from calibrant.calibrators.average import *  # noqa: F403
    from calibrant.calibrators.base import *  # noqa: F403
    from calibrant.calibrators.class_temperatures import *  # noqa: F403
    from calibrant.calibrators.confidence_maps import *  # noqa: F403
    from calibrant.calibrators.features import *  # noqa: F403
    from calibrant.calibrators.histogram import *  # noqa: F403
    from calibrant.calibrators.isotonic import *  # noqa: F403
    from calibrant.calibrators.maccal import *  # noqa: F403
    from calibrant.calibrators.network import *  # noqa: F403
    from calibrant.calibrators.parts import *  # noqa: F403
    from calibrant.calibrators.rank_gaps import *  # noqa: F403
    from calibrant.calibrators.records import *  # noqa: F403
    from calibrant.calibrators.registry import *  # noqa: F403
    from calibrant.calibrators.scaling import *  # noqa: F403
    from calibrant.calibrators.smart import *  # noqa: F403
    from calibrant.calibrators.tags import *  # noqa: F403
    from calibrant.calibrators.top_label import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the classes on first use."""
    if name[0].isupper() or name == "__all__":  # other names are modules
        exported = _exported()
        if name in exported or name == "__all__":
            return sorted(exported) if name == "__all__" else exported[name]
    raise no_attribute(__name__, name, __dir__() if name[0].isupper() else ())


def __dir__() -> list[str]:
    return sorted(_exported())


def _exported() -> dict[str, Any]:
    registry = import_module(f"{__name__}.registry")
    tables = {name: getattr(registry, name) for name in ("CALIBRATORS", "PARTS", "TAG_CALIBRATORS")}
    kinds = [registry.Calibrator, *(kind for table in tables.values() for kind in table.values())]
    return {kind.__name__: kind for kind in kinds} | tables
