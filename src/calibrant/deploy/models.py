"""Classifiers that are loaded by a name: of Hugging Face, of your own code, or exported."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from calibrant._core.messages import comma_separated
from calibrant._core.torch_models import (
    check_complete,
    check_model,
    check_transformers,
    device_and_dtype,
    device_of,
    digest,
    moved,
)
from calibrant.data.formats import Array

_FACTORY = re.compile(r"(?P<module>[^\W\d]\w*(?:\.\w+)*):(?P<attribute>[^\W\d]\w*(?:\.\w+)*)")
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")
_TEXTS, _IMAGES = "ForSequenceClassification", "ForImageClassification"
_FORMS = "a Hugging Face classifier, package.module:factory or a .pt2 file"

Inputs: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"  # by position and by name


@dataclass(frozen=True)
class Classifier:
    """A loaded model, and how its inputs are made from columns of a batch."""

    module: nn.Module
    encode: Callable[[Sequence[Array]], Inputs]
    columns: tuple[str, ...] = ("inputs",)  # unless others are named
    class_names: tuple[str, ...] = ()
    about: str = ""  # settings that its weights do not show

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the weights and settings."""
        dtypes = sorted({str(p.dtype) for p in self.module.parameters()})
        known = f"{self.about} {dtypes} {digest(self.module)}"
        return hashlib.sha256(known.encode()).hexdigest()

    def __call__(self, inputs: Inputs) -> Any:
        """Return the output for a batch."""
        args, named = moved(inputs, device_of(self.module))
        return self.module(*args, **named)


@dataclass(frozen=True)
class _ModelName:
    """The name of a model and how it is loaded: enough for another process to load it."""

    name: str
    weights: str | None = None
    length: int | None = None
    device: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    call: str = ""  # names a run, so that processes that outlive it load the next model


_LOADING = RLock()  # a factory may load another classifier


def _load_classifier(model: _ModelName) -> Classifier:
    """Load a classifier; a process keeps the last one, which its threads share.

    >>> _load_classifier(_ModelName("torch.nn:Identity")).columns
    ('inputs',)
    """
    with _LOADING:  # new weights are drawn from the one generator of all threads
        return _loaded(model)


def _forget_classifier() -> None:
    """Free the classifier that is kept."""
    with _LOADING:
        _loaded.cache_clear()


@lru_cache(maxsize=1)
def _loaded(model: _ModelName) -> Classifier:
    target, precision = device_and_dtype(device=model.device, dtype=model.dtype)
    suffix, factory = Path(model.name).suffix, _FACTORY.fullmatch(model.name)
    if suffix in _PICKLES:
        raise ValueError(
            f"{model.name} is a pickle, which is never loaded since it could run any code: save "
            "the state dict as .safetensors, and name package.module:factory and these weights"
        )
    if factory is None and model.weights is not None:
        raise ValueError(f"weights are for package.module:factory, got {model.name}")
    if factory is not None:
        module = _built(model.name, *factory.group("module", "attribute"))
        if model.weights is not None:
            _load_weights(module, model.weights)
        precision = None if precision == "auto" else precision
        return _array_classifier(module.to(target, precision).eval())
    if suffix == ".pt2":
        if not model.trust_remote_code:
            raise ValueError(
                f"{model.name} may run code when torch loads it, which unpickles parts of such "
                "files: if you trust it, say so with trust_remote_code (--trust-remote-code)"
            )
        if model.dtype != "auto":
            raise ValueError(f"the precision of {model.name} is fixed, got dtype {model.dtype!r}")
        program = torch.export.load(model.name)
        if target is not None:
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, target)
        return _array_classifier(program.module())
    return _pretrained(model, target, precision)


def _array_classifier(module: nn.Module) -> Classifier:
    """Return the classifier of a module that takes arrays, in the precision of the module."""
    floats = (p.dtype for p in module.parameters() if p.is_floating_point())
    return Classifier(module, partial(_tensors, next(floats, torch.float32)))


def _tensors(dtype: torch.dtype, columns: Sequence[Array]) -> Inputs:
    tensors = []
    for values in columns:
        if values.dtype.kind not in "biuf":
            raise ValueError(f"inputs of this model must be numbers, got {values.dtype.name}")
        tensor = torch.from_numpy(np.array(values))
        tensors.append(tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return tuple(tensors), {}


# ----------------------------------------------------------------------------------- your own code


def _built(name: str, module: str, attribute: str) -> nn.Module:
    """Return what a factory returns, or a module that has the name."""
    state = torch.get_rng_state()
    # new weights are the same in every process
    torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        built = found if isinstance(found, nn.Module) else found()
    except ImportError as error:
        raise ImportError(
            f"{name} cannot be imported ({error}): install the package, or run where it lies"
        ) from error
    except AttributeError as error:
        raise ValueError(f"{name} must name a function that returns a model: {error}") from error
    finally:
        torch.set_rng_state(state)
    if not isinstance(built, nn.Module):
        raise TypeError(f"{name} must return an nn.Module, got {type(built).__name__}")
    return built


def _load_weights(module: nn.Module, path: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    if Path(path).suffix != ".safetensors":
        raise ValueError(f"weights must be a .safetensors file, got {path}")
    try:
        load_model(module, path)
    except (RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{path} must have the weights of this {type(module).__name__}: {reason}"
        ) from error


# ------------------------------------------------------------------------------------ Hugging Face


def _pretrained(model: _ModelName, target: torch.device | None, precision: Any) -> Classifier:
    check_transformers("Hugging Face models")
    import transformers

    check_model(model.name)
    options: Any = {"trust_remote_code": model.trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(model.name, **options)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"model must be {_FORMS}, got {model.name}: {reason}") from error
    classes = config.architectures or []
    kind = next((x for x in (_TEXTS, _IMAGES) if any(name.endswith(x) for name in classes)), None)
    if kind is None:
        raise ValueError(
            f"{model.name} must be a classifier of texts or images ({_TEXTS}, {_IMAGES}), got "
            f"{comma_separated(classes)}; token tables of language models are made by: calibrant "
            "llm collect"
        )
    module, report = getattr(transformers, f"AutoModel{kind}").from_pretrained(
        model.name,
        dtype=precision,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, with the missing ones
        **options,
    )
    check_complete(report, model.name, type(module).__name__)
    module = (module if target is None else module.to(target)).eval()
    names = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    if kind == _TEXTS:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.name, **options)
        positions = getattr(config, "max_position_embeddings", None)
        limits = (model.length, tokenizer.model_max_length, positions, 1 << 20)
        length = min(limit for limit in limits if limit)  # in tokens, to which texts are truncated
        encode, about = partial(_encoded, tokenizer, length), f"{tokenizer!r} {length}"
        return Classifier(module, encode, ("text",), names, about)
    processor = transformers.AutoImageProcessor.from_pretrained(model.name, **options)
    about = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    encode = partial(_processed, processor, module.dtype)
    return Classifier(module, encode, ("pixel_values",), names, about)


def _encoded(tokenizer: Any, length: int, columns: Sequence[Array]) -> Inputs:
    """Return the tokens of texts, or of pairs of texts."""
    if any(values.dtype.kind != "U" for values in columns) or len(columns) > 2:
        kinds = comma_separated(values.dtype.name for values in columns)
        raise ValueError(f"inputs of this model must be texts, or pairs of texts, got {kinds}")
    texts = [values.tolist() for values in columns]
    options = {"truncation": True, "max_length": length, "padding": True, "return_tensors": "pt"}
    return (), dict(tokenizer(*texts, **options))


def _processed(processor: Any, dtype: torch.dtype, columns: Sequence[Array]) -> Inputs:
    """Return images as the model takes them; floats are taken for such already."""
    (images, *others) = columns
    if others or images.ndim != 4 or images.dtype.kind not in "uf":
        raise ValueError(
            "inputs of this model must be one array (images, height, width, 3) of uint8, or "
            f"(images, 3, height, width) of floats, got {len(columns)} of shape {images.shape[1:]}"
        )
    if images.dtype.kind == "f":
        pixels = torch.from_numpy(np.array(images))
    else:
        pixels = processor(list(images), return_tensors="pt")["pixel_values"]
    return (), {"pixel_values": pixels.to(dtype)}
