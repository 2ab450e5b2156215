"""Lookups in piecewise maps, against NumPy's own, and as other programs run them."""

import logging
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from calibrant.calibrators.piecewise import BEYOND, _at_place, _interpolate, _place

FINITE = st.floats(-100, 100, width=32)
WIDTHS = [0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 100]


def edges_and_values(rng, width, dtype="float32"):
    """Sorted edges with repeats, and values between, at and beyond them."""
    edges = np.sort(rng.integers(-20, 20, width) / 4).astype(dtype)
    values = np.concatenate(
        [edges, rng.normal(scale=5, size=200), [-1e30, 1e30, -np.inf, np.inf]]
    ).astype(dtype)
    return edges, values


# The place of a value.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", WIDTHS)
def test_place_is_the_number_of_edges_below(rng, width, dtype):
    edges, values = edges_and_values(rng, width, dtype)
    found = _place(torch.from_numpy(values), torch.from_numpy(edges))
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found, np.searchsorted(edges, values, side="left"))


@given(
    arrays(np.float32, st.integers(1, 40), elements=FINITE),
    arrays(np.float32, st.integers(1, 40), elements=FINITE),
)
def test_place_of_any_values(edges, values):
    edges = np.sort(edges)
    found = _place(torch.from_numpy(values), torch.from_numpy(edges))
    np.testing.assert_array_equal(found, np.searchsorted(edges, values))
    at_edges = _place(torch.from_numpy(edges), torch.from_numpy(edges))
    np.testing.assert_array_equal(at_edges, np.searchsorted(edges, edges))


@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_every_class_has_its_edges(rng, lead):
    edges = np.sort(rng.normal(size=(4, 6)), axis=-1)
    values = rng.normal(size=(*lead, 4))
    found = _place(torch.from_numpy(values), torch.from_numpy(edges)).numpy()
    for k in range(4):
        np.testing.assert_array_equal(found[..., k], np.searchsorted(edges[k], values[..., k]))


def test_short_rows_are_filled_up(rng):
    short = np.sort(rng.normal(size=3)).astype("float32")
    edges = np.full((2, 5), BEYOND, "float32")
    edges[0, :3], edges[1] = short, np.sort(rng.normal(size=5))
    values = np.array([[x, x] for x in (-9.0, *short, 0.0, 9.0, 1e38)], "float32")
    found = _place(torch.from_numpy(values), torch.from_numpy(edges))
    np.testing.assert_array_equal(found[:, 0], np.searchsorted(short, values[:, 0]))
    assert found[-1].tolist() == [3, 5]


def test_edges_take_the_type_of_the_values():
    """A float64 value just above a float32 edge is above it."""
    edge = torch.tensor([0.1])
    values = torch.tensor([float(edge), float(edge) + 1e-12], dtype=torch.float64)
    assert _place(values, edge).tolist() == [0, 1]


# The entry at a place.


@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_entries(rng, lead):
    table, index = rng.normal(size=7), rng.integers(0, 7, (*lead, 4))
    found = _at_place(torch.from_numpy(table), torch.from_numpy(index))
    np.testing.assert_array_equal(found, table[index])
    tables = rng.normal(size=(4, 7))
    found = _at_place(torch.from_numpy(tables), torch.from_numpy(index))
    np.testing.assert_array_equal(found, tables[np.arange(4), index])


# The broken line.


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_interpolation(rng, width):
    x, y = np.sort(rng.normal(size=width)), rng.normal(size=width)
    values = np.concatenate([x, rng.normal(scale=2, size=300), [-1e30, 1e30, -np.inf, np.inf]])
    found = _interpolate(*map(torch.from_numpy, (values, x, y)))
    np.testing.assert_allclose(found, np.interp(values, x, y), rtol=1e-12, atol=1e-12)


@given(
    arrays(np.float64, st.integers(1, 20), elements=FINITE, unique=True),
    arrays(np.float64, st.integers(1, 20), elements=FINITE),
    st.data(),
)
def test_interpolation_of_any_points(x, values, data):
    x = np.sort(x)
    y = data.draw(arrays(np.float64, len(x), elements=FINITE))
    found = _interpolate(*map(torch.from_numpy, (values, x, y))).numpy()
    np.testing.assert_allclose(found, np.interp(values, x, y), rtol=1e-9, atol=1e-9)
    assert y.min() <= found.min()
    assert found.max() <= y.max()


def test_interpolation_with_jumps():
    """At a jump the value of the earlier point, beyond it that of the later."""
    x, y = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 5.0, 6.0])
    values = torch.tensor([0.5, 1.0, 1.0 + 1e-6, 1.5])
    assert torch.allclose(_interpolate(values, x, y), torch.tensor([0.5, 1.0, 5.0, 5.5]), atol=1e-5)
    x, y = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    values = torch.tensor([-0.5, 0.0, 0.5, 1.0, 1.25, 9.0])
    assert _interpolate(values, x, y).tolist() == [1, 1, 2.5, 3, 4, 4]


def test_interpolation_by_class_with_short_rows(rng):
    x, y = np.sort(rng.normal(size=(3, 6))), rng.normal(size=(3, 6))
    x[1, 3:], y[1, 3:] = x[1, 2], y[1, 2]  # three points, the last of them repeated
    values = np.concatenate([rng.normal(size=(50, 3)), x.T])
    found = _interpolate(*map(torch.from_numpy, (values, x, y)))
    for k, count in enumerate((6, 3, 6)):
        wanted = np.interp(values[:, k], x[k, :count], y[k, :count])
        np.testing.assert_allclose(found[:, k], wanted, atol=1e-12)


def test_a_rising_line_rises_in_float32(rng):
    """Calibrators rely on it to keep the order of classes."""
    x = torch.from_numpy(np.sort(rng.normal(size=30))).float()
    y = torch.from_numpy(np.sort(rng.normal(size=30))).float()
    values = torch.from_numpy(np.sort(rng.normal(size=20_000))).float()
    assert (_interpolate(values, x, y).diff() >= 0).all()


# In other programs.


class Maps(nn.Module):
    """All of them at once, with a table for each class or one for all."""

    edges: torch.Tensor
    table: torch.Tensor
    heights: torch.Tensor

    def __init__(self, rng, shape):
        super().__init__()
        edges = np.sort(rng.normal(size=(*shape, 13)))
        table, heights = rng.normal(size=(*shape, 14)), rng.normal(size=(*shape, 13))
        for name, values in (("edges", edges), ("table", table), ("heights", heights)):
            self.register_buffer(name, torch.from_numpy(values).float())

    def forward(self, values):
        index = _place(values, self.edges)
        return index, _at_place(self.table, index), _interpolate(values, self.edges, self.heights)


@pytest.mark.parametrize(("shape", "tokens"), [((), True), ((10,), False)])
@pytest.mark.usefixtures("operators_read_once")
def test_exported(rng, tmp_path, monkeypatch, shape, tokens):
    monkeypatch.setattr(logging.getLogger("torch.onnx"), "level", logging.ERROR)
    module = Maps(rng, shape)
    lead = (2, 3) if tokens else (2,)
    dims = {i: torch.export.Dim.DYNAMIC for i in range(len(lead))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        program = torch.export.export(
            module, (torch.randn(*lead, 10),), dynamic_shapes=(dims,), strict=False
        )
        written = torch.onnx.export(program, dynamo=True, verbose=False)
    assert written is not None
    written.save(tmp_path / "maps.onnx", external_data=False)
    session = onnxruntime.InferenceSession(
        tmp_path / "maps.onnx", providers=["CPUExecutionProvider"]
    )
    (name,) = (one.name for one in session.get_inputs())
    for rows in (1, 501):
        values = torch.randn(rows, *(4,) * tokens, 10)
        values[..., 0] = module.edges.reshape(-1)[5]  # at an edge
        values[0, ..., 1:3] = torch.tensor([-torch.inf, torch.inf])
        wanted = module(values)
        for found in (session.run(None, {name: values.numpy()}), program.module()(values)):
            np.testing.assert_array_equal(found[0], wanted[0])
            np.testing.assert_array_equal(found[1], wanted[1])
            np.testing.assert_allclose(found[2], wanted[2], atol=1e-6)
