"""Objects to artifacts, artifacts to bytes, and back; everything that is read is checked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import load as tensors_of, save as bytes_of
from torch import Tensor, nn

from calibrant._core.messages import comma_separated, unknown_name
from calibrant._core.options import check_options, options_of
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.online import Recent
from calibrant.calibrators.registry import CALIBRATORS, PARTS, TAG_CALIBRATORS

FORMAT = 1
_KEYS = ("format", "kind", "description", "calibrant", "config", "extra", "sha256")
NAMES = "class_names_"
MASKED = "masked classes"
_TRIAL_ROWS, _MAX_NUMBERS = 16, 1 << 21
"""Rows of a trial, fewer where they would have more numbers than this."""

# Package and class of every kind besides calibrators; imported when needed.
KINDS = {
    "prior": "calibrant.decide:PriorCorrection",
    "threshold": "calibrant.decide:Threshold",
    "sets": "calibrant.decide:ConformalSets",
    "decision": "calibrant.decide:DecisionRule",
    "head": "calibrant.llm:FittedHead",
    "answers": "calibrant.llm:AnswerCalibrator",
    "gate": "calibrant.llm:Gate",
    "gate_watch": "calibrant.llm:GateWatch",
    "signals": "calibrant.llm:SignalCalibrator",
    "monitor": "calibrant.monitor:Monitor",
}


class Artifact(NamedTuple):
    """The content of an artifact.

    Attributes
    ----------
    kind : str
        Name of a class.
    description : str
    calibrant : str
        Version that wrote it.
    config : dict
        Arguments of the constructor; modules among them as ``{"kind": ..., "config": ...}``.
    extra : dict
        Entries of the ``state_dict`` that are no tensors, and names of classes.
    tensors : dict
    """

    kind: str
    description: str
    calibrant: str
    config: Any
    extra: Any
    tensors: dict[str, Tensor]


def _calibrator_kinds() -> dict[str, type[Calibrator]]:
    """Return the classes of calibrators by kind; names of methods for tags may be taken."""
    tags = {f"multilabel_{name}": kind for name, kind in TAG_CALIBRATORS.items()}
    return {**CALIBRATORS, **PARTS, **tags}


def kind_of(obj: Any) -> str:
    """Return the name of the kind that an object is saved as."""
    # a subclass would come back as its parent: the type must be the very one
    for kind, where in KINDS.items():
        package, _, name = where.partition(":")
        if type(obj).__name__ == name and type(obj).__module__.startswith(package):
            return kind
    calibrators = _calibrator_kinds()
    for kind, calibrator in calibrators.items():
        if type(obj) is calibrator:
            return kind
    if isinstance(obj, type):
        raise TypeError(f"the class {obj.__name__} cannot be saved: fit an object of it first")
    remedy = f"choose an object of kind {comma_separated([*calibrators, *KINDS])}"
    if hasattr(obj, "get_params"):
        remedy = "save estimators of scikit-learn by joblib.dump"
    raise TypeError(f"a {type(obj).__name__} cannot be saved: {remedy}")


def class_of(kind: Any) -> Any:
    """Return the class of the name of a kind."""
    calibrators = _calibrator_kinds()
    known = [*calibrators, *KINDS]
    if not isinstance(kind, str) or kind not in known:
        raise unknown_name("kind", kind, known)
    if kind in calibrators:
        return calibrators[kind]
    package, _, name = KINDS[kind].partition(":")
    return getattr(import_module(package), name)


def artifact_of(obj: Any) -> Artifact:
    """Return the artifact of a fitted object."""
    from calibrant import __version__

    kind = kind_of(obj)
    if not getattr(obj, "classes", 1):
        raise ValueError(f"this {type(obj).__name__} is not fitted: call fit first")
    config: Any = {}
    if hasattr(obj, "from_state"):
        state = {"state": _json_tensor(obj.state())}
    else:
        config, state = _plain(obj.config()), obj.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    extra: dict[str, Any] = {name: v for name, v in state.items() if name not in tensors}
    extra |= {path: list(names) for path, names in _class_names(obj) if names is not None}
    # clones, since safetensors refuse tensors that share memory; of usual strides, since those of
    # a single value may be 0, and its bytes cannot be viewed then
    usual = torch.contiguous_format
    tensors = {name: t.detach().cpu().clone(memory_format=usual) for name, t in tensors.items()}
    description = obj.describe() if hasattr(obj, "describe") else " ".join(str(obj).split())
    return Artifact(kind, description, __version__, config, extra, tensors)


def _class_names(obj: Any) -> Iterator[tuple[str, Sequence[str] | None]]:
    """Yield where each module keeps its class names, if it may have some, and these."""
    for path, module in obj.named_modules() if isinstance(obj, nn.Module) else ():
        if hasattr(module, NAMES):
            yield f"{path}.{NAMES}".lstrip("."), module.class_names_


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return {"kind": kind_of(value), "config": _plain(value.config())}  # type: ignore[operator]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def restored(artifact: Artifact) -> Any:
    """Make the object that an artifact describes, or raise ValueError."""
    cls = class_of(artifact.kind)
    if hasattr(cls, "from_state"):
        return _from_text(cls, artifact)
    if not isinstance(artifact.extra, dict):
        raise ValueError(f"extra must be an object, got {artifact.extra!r:.60}")
    extra = dict(artifact.extra)
    with torch.device("meta"):  # where tensors have shapes, of any size, but no memory
        skeleton = _built(artifact.kind, artifact.config)
        named = [(path, extra.pop(path)) for path, _ in _class_names(skeleton) if path in extra]
        for name, value in extra.items():
            owner, _, last = name.rpartition(".")
            if last != "_extra_state":
                raise ValueError(f"{name} must be a tensor")
            skeleton.get_submodule(owner).set_extra_state(value)
        modules = skeleton.named_modules() if isinstance(skeleton, nn.Module) else ()
        for path, module in list(modules):
            if f"{path}.recent_.logits".lstrip(".") in artifact.tensors:
                module.recent_ = Recent()
    wanted, tensors = skeleton.state_dict(), artifact.tensors
    _check_names([*tensors, *extra], wanted, "tensors")
    for name, value in tensors.items():
        dtype = getattr(wanted[name], "dtype", None)
        if value.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {value.dtype}")
        if not torch.isfinite(value).all():
            raise ValueError(f"{name} holds NaN or infinity")
    _check_shapes(skeleton, tensors, wanted)
    obj = _built(artifact.kind, artifact.config)
    obj.load_state_dict({**tensors, **extra})
    if getattr(obj, "classes", 1) < 1:
        raise ValueError(f"its number of classes is {obj.classes}")
    inside = list(obj.modules()) if isinstance(obj, nn.Module) else []
    classes = {module.classes for module in inside if isinstance(module, Calibrator)}
    sizes = {max(n, 2) for n in classes}  # one logit stands for two classes
    floors = [float(v) for name, v in tensors.items() if name.rpartition(".")[2] == "floor_"]
    if not all(0 <= floor < 1 for floor in floors):
        raise ValueError(f"floor_ must be in [0, 1), got {max(floors):g}")
    if len(sizes) > 1 or min(classes, default=1) < 1:
        raise ValueError(f"its parts have {comma_separated(map(str, sorted(classes)))} classes")
    for path, names in named:
        module = obj.get_submodule(path.removesuffix(NAMES).rstrip("."))
        count = max(module.classes, 2)
        texts = [x for x in names if isinstance(x, str)] if isinstance(names, list) else []
        if not len({*texts}) == len(names) == count:
            raise ValueError(f"{NAMES} must name {count} classes, got {names!r:.60}")
        module.class_names_ = tuple(texts)
    for module in inside:
        if isinstance(module, Calibrator):
            check_learned(module)
    return obj


def _from_text(cls: Any, artifact: Artifact) -> Any:
    _check_names([*artifact.config, *artifact.extra], (), "config")
    _check_names(artifact.tensors, ("state",), "tensors")
    text = artifact.tensors["state"]
    if text.dtype != torch.uint8:
        raise ValueError(f"state must be uint8, the bytes of a text, got {text.dtype}")
    state = _parsed_json(text.numpy().tobytes(), "state")
    try:
        return cls.from_state(state)
    except Exception as error:
        raise ValueError(f"it is not the state of a {cls.__name__} ({error})") from error


def _built(kind: Any, config: Any) -> Any:
    cls = class_of(kind)
    build = getattr(cls, "from_config", cls)
    if not isinstance(config, dict):
        raise ValueError(f"the config of {kind} must be an object, got {config!r:.60}")
    options = options_of(build)
    _check_names(config, options, f"arguments of {kind}")
    arguments = {name: _argument(value) for name, value in config.items()}
    checked = check_options(options, arguments)
    try:
        return build(**checked)
    except (ArithmeticError, AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(f"{kind} does not take the arguments {config!r:.200} ({error})") from error


def _argument(value: Any) -> Any:
    if isinstance(value, list):
        return [_argument(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"kind", "config"}:
        return _built(**value)
    return {key: _argument(item) for key, item in value.items()}


def _check_shapes(skeleton: Any, tensors: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> None:
    """Raise unless tensors have the shapes of the skeleton, or its ``learned_shapes``."""
    learned: dict[str, tuple[str, dict[str, int]]] = {}
    for prefix, module in skeleton.named_modules() if isinstance(skeleton, nn.Module) else ():
        start = f"{prefix}." if prefix else ""
        values = {name: tensors.get(f"{start}{name}_") for name in ("classes", "width")}
        sizes = {name: int(v) for name, v in values.items() if v is not None and v.ndim == 0}
        if sizes.get("classes") == 1 and not getattr(module, "multilabel", False):
            # one logit stands for two classes
            sizes["classes"] = 2
        for shape in filter(None, getattr(module, "learned_shapes", "").split("; ")):
            name, _, dimensions = shape.partition(" ")
            learned[start + name] = dimensions, sizes
    for name, value in tensors.items():
        came, usual = tuple(value.shape), tuple(wanted[name].shape)
        dimensions, sizes = learned.get(name, (" ".join("=" * len(usual)), {}))
        if not any(_fits(came, usual, form.split(), sizes) for form in dimensions.split("|")):
            expected = f"({dimensions}) for {sizes}" if name in learned else usual
            raise ValueError(f"{name} must have the shape {expected}, got {came}")


def _fits(
    shape: tuple[int, ...], usual: tuple[int, ...], names: list[str], sizes: dict[str, int]
) -> bool:
    """Compare a shape with named dimensions, and note the sizes of names that are new.

    >>> sizes = {"classes": 3}
    >>> _fits((3, 5), (0, 0), ["classes", "cuts"], sizes), _fits((6,), (0,), ["cuts+1"], sizes)
    (True, True)
    >>> _fits((2,), (1,), ["classes-1"], sizes), _fits((3,), (1,), ["classes-1"], sizes)
    (True, False)
    """
    if len(shape) != len(names):
        return False
    for axis, (size, name) in enumerate(zip(shape, names, strict=True)):
        base, _, more = name.replace("-", "+-").partition("+")
        rest = size - int(more or 0)
        if rest != (usual[axis] if name == "=" else sizes.setdefault(base, rest)):
            return False
    return True


# ------------------------------------------------------------------------------------- to bytes


def packed(artifact: Artifact) -> bytes:
    """Serialise an artifact; config and extra are JSON, and metadata come first in the file."""
    config, extra = _to_json(artifact.config), _to_json(artifact.extra)
    digest = _digest(config, extra, artifact.tensors)
    values = (str(FORMAT), *artifact[:3], config, extra, digest)
    plain = bytes_of(artifact.tensors)
    # not by safetensors, which write metadata in random order
    header = {"__metadata__": dict(zip(_KEYS, values, strict=True)), **_header(plain)}
    text = json.dumps(header, indent=1, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # keeps the tensors aligned
    return b"".join(
        [len(text).to_bytes(8, "little"), text, plain[8 + int.from_bytes(plain[:8], "little") :]]
    )


def unpacked(content: bytes) -> Artifact:
    """Parse the bytes of an artifact; raises ValueError for anything else."""
    try:
        tensors = tensors_of(content)
    except Exception as error:  # of several kinds
        raise ValueError(f"it is not a safetensors file, or damaged ({error})") from error
    metadata: dict[str, str] = _header(content).get("__metadata__") or {}
    if metadata.get("format") != str(FORMAT):
        version = metadata.get("format")
        raise ValueError(f"its format is {version!r:.60}, this release reads {FORMAT}")
    _check_names(metadata, _KEYS, "metadata")
    if metadata["sha256"] != _digest(metadata["config"], metadata["extra"], tensors):
        raise ValueError("it is damaged: the checksum differs")
    kind, description, calibrant = (metadata[key] for key in _KEYS[1:4])
    config, extra = (_parsed_json(metadata[key], key) for key in _KEYS[4:6])
    return Artifact(kind, description, calibrant, config, extra, tensors)


def holds_predictions(content: bytes) -> bool:
    """Return True for safetensors with logits or probs of any split, without our metadata."""
    try:
        header = _header(content)
        return "kind" not in header.get("__metadata__", {}) and any(
            name.endswith(("logits", "probs")) for name in header
        )
    except (ValueError, AttributeError, RecursionError):
        return False


def _header(content: bytes) -> Any:
    """Return the header of safetensors: about each tensor, and ``__metadata__``."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _digest(config: str, extra: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(f"{config}\n{extra}\n".encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _to_json(value: Any) -> str:
    """Write a value as JSON, which knows neither NaN nor infinity."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        remedy = "use finite Python numbers, strings, and lists of them"
        raise ValueError(f"{value!r:.200} cannot be written to JSON ({error}): {remedy}") from error


def _parsed_json(text: str | bytes, what: str) -> Any:
    """Read JSON."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON ({error})") from error


def _json_tensor(value: Any) -> Tensor:
    """Return the bytes of the JSON of a value as a tensor."""
    return torch.frombuffer(bytearray(_to_json(value).encode()), dtype=torch.uint8)


def _check_names(names: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Raise unless names are exactly those that are wanted."""
    missing, unknown = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
    if missing or unknown:
        lists = f"missing {comma_separated(missing)}, unknown {comma_separated(unknown)}"
        raise ValueError(f"{what}: {lists}")


# ------------------------------------------------- inputs at the limits of what is legal


def random_inputs(
    calibrator: Calibrator, shape: tuple[int, ...], random: torch.Generator
) -> tuple[Tensor, ...]:
    """Return logits, and features where the calibrator needs them, for rows of a shape."""
    row = () if calibrator.one_logit else (calibrator.classes,)
    logits = 3 * torch.randn((*shape, *row), generator=random)
    if not calibrator.needs_features:
        return (logits,)
    return logits, torch.randn((*shape, calibrator.width), generator=random)


def edge_cases(calibrator: Calibrator, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield logits at the limits of what is legal, and what they are."""
    shape = () if calibrator.one_logit else (calibrator.classes,)
    several = math.prod(shape) > 1
    count = max(2, min(_TRIAL_ROWS, _MAX_NUMBERS // math.prod(shape)))
    rows = torch.randn((count, *shape), generator=random)
    if several:  # the first class leads in one row, the last in another
        rows[0], rows[1] = rows[0].sort(descending=True).values, rows[1].sort().values
    yield "large logits", 1e4 * rows
    yield "small logits", 1e-4 * rows
    yield "equal logits", torch.zeros_like(rows)
    if not several:
        return
    at, (first, second) = torch.arange(len(rows)), rows.topk(2, dim=-1).indices.unbind(-1)
    tied = rows.clone()
    tied[at, second] = rows[at, first]
    yield "ties", tied
    near = rows.clone()
    near[at, second] = rows[at, first].nextafter(torch.tensor(torch.inf))
    yield "near ties", near
    masked = torch.cat([rows, 1e3 * rows])
    masked[:, ::2] = -torch.inf
    masked[0] = -torch.inf
    masked[0, 0] = 0
    yield MASKED, masked


@torch.no_grad()
def check_learned(calibrator: Calibrator) -> None:
    """Raise ValueError for learned values that no fit gives, and that make probabilities NaN."""
    for name, value in calibrator.named_buffers(recurse=False):
        if name in calibrator.positive and not (value > 0).all():
            raise ValueError(f"{name} must be positive, got {float(value.min()):g}")
    if max(calibrator.classes, calibrator.width) > _MAX_NUMBERS:
        return  # a number that no tensor has to agree with
    random = torch.Generator().manual_seed(0)
    for trial, logits in edge_cases(calibrator, random):
        features = (1e4 * x for x in random_inputs(calibrator, logits.shape[:1], random)[1:])
        if trial != MASKED and calibrator(logits, *features).isnan().any():
            raise ValueError(f"its learned values make probabilities NaN, of {trial} for instance")
