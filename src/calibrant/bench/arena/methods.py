"""Methods of the arena: calibrators by name, peers, and classes of others."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy.special import softmax

import calibrant.calibrators
from calibrant import __version__
from calibrant._core.checks import FloatArray
from calibrant._core.options import options_of, parse_options, parsed_text
from calibrant.bench.arena.peers import PEERS, Peer
from calibrant.bench.arena.tasks import Examples, Predictions, logits_of
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.registry import CALIBRATORS, make_calibrator
from calibrant.data.formats import Array

GROUP = "calibrant.calibrators"
"""Group of entry points under which other packages register their calibrators."""


class Entrant(Protocol):
    """A calibrator that is fitted on a task and maps logits to log-probabilities."""

    def fit(self, predictions: Predictions) -> None: ...  # noqa: D102
    def predict(self, examples: Examples) -> Array: ...  # noqa: D102


@dataclass(frozen=True)
class Method:
    """A method as it is named: ``ts``, ``ts:objective=brier``, ``sklearn:isotonic``, ``mine:Map``.

    ``name`` is that of a calibrator of calibrant, an entry point, a ``library:method`` of a peer,
    or ``module:Class``. ``options`` are arguments of its constructor, each as ``key=value``.
    """

    name: str
    options: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The method as it is named."""
        return ":".join([self.name, *self.options])

    @property
    def version(self) -> str:
        """Version of the package that the method comes from."""
        return _version(self.name)

    def make(self) -> Entrant:
        """Return a new calibrator, not fitted yet."""
        if self.name in CALIBRATORS:
            options = options_of(CALIBRATORS[self.name])
            return _OnLogits(
                make_calibrator(self.name, parse_options(self.name, options, self._texts()))
            )
        peer = _peer(self.name)
        kind = partial(peer.make, self.name.partition(":")[2]) if peer else _class_of(self.name)
        made = kind(**{name: parsed_text(text) for name, text in self._texts().items()})
        return _OnLogits(made) if isinstance(made, Calibrator) else _OnProbs(made)

    def _texts(self) -> dict[str, str]:
        return dict(option.split("=", 1) for option in self.options)


def read_methods(text: str | None = None) -> list[Method]:
    """Return the methods in a list with commas or spaces.

    By default these are all calibrators of calibrant that need nothing but logits.

    >>> [method.text for method in read_methods("none, TS:objective=brier")]
    ['none', 'ts:objective=brier']
    """
    usual = [n for n, kind in CALIBRATORS.items() if not (kind.needs_features or kind.needs_head)]
    return list(dict.fromkeys(map(read_method, split_names(text) or usual)))


def split_names(text: str | None) -> list[str] | None:
    """Return names with commas or spaces between, each as it is; None for no text.

    >>> split_names('auto:candidates=["none","ts"],ts')
    ['auto:candidates=["none","ts"]', 'ts']
    """
    return list(filter(None, re.split(r"[,\s]+(?![^\[]*\])", text))) if text else None


def read_method(text: str) -> Method:
    """Return a method by its name with options, as ``name:key=value``."""
    parts = text.split(":")
    name = ":".join(part for part in parts if "=" not in part)
    if ":" not in name and (
        name not in entry_points() or name in {*CALIBRATORS, *CALIBRATORS.aliases}
    ):
        name = CALIBRATORS.name(name)
    method = Method(name, tuple(part for part in parts if "=" in part))
    method.make()  # so that a wrong option or a missing package is an error before anything runs
    return method


@cache
def entry_points() -> dict[str, metadata.EntryPoint]:
    """Calibrators of other packages, by name."""
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _class_of(name: str) -> Any:
    if name in entry_points():
        return entry_points()[name].load()
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a class in the working folder
    loaded = import_module(module)
    if not hasattr(loaded, attribute):
        raise ValueError(f"{module} has no class {attribute!r}: name a method as module:Class")
    return getattr(loaded, attribute)


def _peer(name: str) -> Peer | None:
    library, colon, _ = name.partition(":")
    return PEERS.get(library) if colon else None


@cache
def _version(name: str) -> str:
    peer = _peer(name)
    if peer is not None:
        return metadata.version(peer.package)
    if name in CALIBRATORS:
        return own_version()
    module: str = _class_of(name).__module__
    return version_of(module)


@cache
def own_version() -> str:
    """Version of calibrant; of a development version with a hash of the calibrators' code."""
    if "dev" not in __version__ and __version__ != "unknown":
        return str(__version__)
    return f"{__version__}.{_hash_of(Path(calibrant.calibrators.__file__).parent)}"


def version_of(module: str) -> str:
    """Version of the package that a module is from, or a hash of its file."""
    names = metadata.packages_distributions().get(module.partition(".")[0])
    if names:
        return metadata.version(names[0])
    file = inspect.getsourcefile(sys.modules[module])
    return _hash_of(Path(file)) if file else "unknown"


def _hash_of(path: Path) -> str:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


class _OnLogits:
    """A calibrator of calibrant."""

    def __init__(self, calibrator: Calibrator) -> None:
        self.calibrator = calibrator
        self.uses_features = calibrator.needs_features or calibrator.uses_features

    def fit(self, predictions: Predictions) -> None:
        """Fit on the examples, with their features and the last layer where they are used."""
        logits, labels, features = predictions.fit
        features = features if self.uses_features else None
        self.calibrator.fit(logits, labels, features=features, head=predictions.head)

    def predict(self, examples: Examples) -> Array:
        """Return calibrated logits."""
        features = examples.features if self.calibrator.width else None
        return self.calibrator.transform(examples.logits, features)


class _OnProbs:
    """Any object with ``fit(probs, labels)`` and ``predict_proba(probs)``.

    Where it has the attribute ``takes = "logits"``, it gets logits in place of probabilities.
    """

    def __init__(self, calibrator: Any) -> None:
        self.calibrator = calibrator

    def fit(self, predictions: Predictions) -> None:
        """Fit on probabilities ``(n, classes)``."""
        self.calibrator.fit(self._inputs(predictions.fit), predictions.fit.labels)

    def predict(self, examples: Examples) -> FloatArray:
        """Return log-probabilities."""
        return logits_of(np.asarray(self.calibrator.predict_proba(self._inputs(examples))))

    def _inputs(self, examples: Examples) -> Array:
        if getattr(self.calibrator, "takes", "probs") == "logits":
            return examples.logits
        return np.asarray(softmax(examples.logits.astype(np.float64), -1))
