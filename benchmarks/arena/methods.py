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
from benchmarks.arena.peers import PEERS
from benchmarks.arena.tasks import Examples, Predictions, logits_of
from calibrant import __version__
from calibrant._core.options import Registry, options_of, parse_options, parsed_text
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.registry import CALIBRATORS, PARTS, make_calibrator
from calibrant.data.formats import Array

OURS = Registry("method", {**CALIBRATORS, **PARTS})
"""Methods of calibrant, and the parts of ``auto``."""


class Entrant(Protocol):
    """A calibrator that is fitted on a task and maps logits to log-probabilities."""

    def fit(self, predictions: Predictions) -> None: ...
    def predict(self, examples: Examples) -> Array: ...


@dataclass(frozen=True)
class Method:
    """A method as it is named: ``ts``, ``ts:objective=brier``, ``sklearn:isotonic``, ``mine:Map``.

    ``name`` is that of a calibrator of calibrant, a ``library:method`` of a peer, or
    ``module:Class``. ``options`` are arguments of its constructor, each as ``key=value``.
    """

    name: str
    options: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return ":".join([self.name, *self.options])

    @property
    def version(self) -> str:
        return _version(self.name)

    def make(self) -> Entrant:
        """Return a new calibrator, not fitted yet."""
        texts = dict(option.split("=", 1) for option in self.options)
        if self.name in OURS:
            options = parse_options(self.name, options_of(OURS[self.name]), texts)
            return _OnLogits(make_calibrator(self.name, options))
        library, _, method = self.name.partition(":")
        kind = partial(PEERS[library].make, method) if library in PEERS else _class_of(self.name)
        made = kind(**{name: parsed_text(text) for name, text in texts.items()})
        return _OnLogits(made) if isinstance(made, Calibrator) else _OnProbs(made)


def read_methods(text: str | None = None) -> list[Method]:
    """Return the methods in a list with commas or spaces.

    By default these are all calibrators of calibrant that need nothing but logits.
    """
    usual = [n for n, kind in CALIBRATORS.items() if not (kind.needs_features or kind.needs_head)]
    return list(dict.fromkeys(map(read_method, split_names(text) or usual)))


def split_names(text: str | None) -> list[str] | None:
    """Return names with commas or spaces between, not within brackets; None for no text."""
    return list(filter(None, re.split(r"[,\s]+(?![^\[]*\])", text))) if text else None


def read_method(text: str) -> Method:
    """Return a method by its name with options, as ``name:key=value``."""
    parts = text.split(":")
    name = ":".join(part for part in parts if "=" not in part)
    name = name if ":" in name else OURS.name(name)
    method = Method(name, tuple(part for part in parts if "=" in part))
    method.make()  # so that a wrong option or a missing package is an error before anything runs
    return method


def _class_of(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a class in the working folder
    loaded = import_module(module)
    if not hasattr(loaded, attribute):
        raise ValueError(f"{module} has no class {attribute!r}: name a method as module:Class")
    return getattr(loaded, attribute)


@cache
def _version(name: str) -> str:
    """Version of the package of a method; of code under development, a hash of it."""
    library = name.partition(":")[0]
    if library in PEERS:
        return metadata.version(PEERS[library].package)
    if name in OURS:
        if "dev" not in __version__ and __version__ != "unknown":
            return str(__version__)
        folder = Path(calibrant.calibrators.__file__).parent
        return f"{__version__}.{_hash_of(sorted(folder.rglob('*.py')))}"
    module = _class_of(name).__module__
    packages = metadata.packages_distributions().get(module.partition(".")[0])
    if packages:
        return metadata.version(packages[0])
    file = inspect.getsourcefile(sys.modules[module])
    return _hash_of([Path(file)]) if file else "unknown"


def _hash_of(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


class _OnLogits:
    """A calibrator of calibrant."""

    def __init__(self, calibrator: Calibrator) -> None:
        self.calibrator = calibrator

    def fit(self, predictions: Predictions) -> None:
        logits, labels, features = predictions.fit
        uses = self.calibrator.needs_features or self.calibrator.uses_features
        features = features if uses else None
        self.calibrator.fit(logits, labels, features=features, head=predictions.head)

    def predict(self, examples: Examples) -> Array:
        features = examples.features if self.calibrator.width else None
        return self.calibrator.transform(examples.logits, features)


class _OnProbs:
    """Any object with ``fit(probs, labels)`` and ``predict_proba(probs)``.

    If it has the attribute ``takes = "logits"``, it gets logits in place of probabilities.
    """

    def __init__(self, calibrator: Any) -> None:
        self.calibrator = calibrator

    def fit(self, predictions: Predictions) -> None:
        self.calibrator.fit(self._inputs(predictions.fit), predictions.fit.labels)

    def predict(self, examples: Examples) -> Array:
        return logits_of(np.asarray(self.calibrator.predict_proba(self._inputs(examples))))

    def _inputs(self, examples: Examples) -> Array:
        if getattr(self.calibrator, "takes", "probs") == "logits":
            return examples.logits
        return np.asarray(softmax(examples.logits.astype(np.float64), -1))
