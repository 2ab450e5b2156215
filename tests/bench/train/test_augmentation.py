"""Shifted and mirrored images against a slow definition."""

import math

import pytest
import torch

from calibrant.bench.train.augmentation import shift_and_mirror


def pixel_by_pixel(images, random, shift):
    """Cut each image out of one with black around it."""
    count, _, height, width = images.shape
    down = torch.randint(0, 2 * shift + 1, (count, 1), generator=random)
    right = torch.randint(0, 2 * shift + 1, (count, 1), generator=random)
    mirrored = torch.rand((count, 1), generator=random) < 0.5
    moved = torch.zeros_like(images)
    for i in range(count):
        for y in range(height):
            for x in range(width):
                from_y = y + int(down[i]) - shift
                from_x = (width - 1 - x if mirrored[i] else x) + int(right[i]) - shift
                if 0 <= from_y < height and 0 <= from_x < width:
                    moved[i, :, y, x] = images[i, :, from_y, from_x]
    return moved


@pytest.mark.parametrize(
    ("dtype", "shift"), [(torch.float32, 4), (torch.bfloat16, 1), (torch.uint8, 4)]
)
def test_images_are_moved_as_in_the_slow_definition(dtype, shift):
    images = torch.randint(1, 256, (12, 3, 8, 6)).to(dtype)
    one, other = (torch.Generator().manual_seed(5) for _ in range(2))
    moved = shift_and_mirror(images, one, shift)
    assert (moved.dtype, moved.shape) == (dtype, images.shape)
    assert torch.equal(moved, pixel_by_pixel(images, other, shift))


def test_half_are_mirrored_and_all_shifts_are_equally_likely():
    count = 8100
    image = torch.arange(1.0, 257).reshape(1, 1, 16, 16)
    moved = shift_and_mirror(image.expand(count, 1, 16, 16), torch.Generator().manual_seed(1))[:, 0]
    inner = moved[:, 6:9, 6:9]  # never touched by the black border
    step = inner[:, 0, 1] - inner[:, 0, 0]
    assert set(step.tolist()) == {1.0, -1.0}
    assert abs((step < 0).double().mean() - 0.5) < 4 * 0.5 / math.sqrt(count)
    y, x = (inner[:, 1, 1] - 1).long() // 16, (inner[:, 1, 1] - 1).long() % 16
    shifts = torch.stack([y - 7, torch.where(step < 0, x - 8, x - 7)])
    assert (int(shifts.min()), int(shifts.max())) == (-4, 4)
    counts = torch.bincount((shifts[0] + 4) * 9 + shifts[1] + 4, minlength=81)
    assert (counts - 100).abs().max() < 45  # 4.5 deviations of a count of 100
