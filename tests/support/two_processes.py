"""A training script for two processes, as torchrun would start them."""

import copy
import multiprocessing
import os
import socket
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from benchmarks.train import results
from benchmarks.train.__main__ import main
from benchmarks.train.ranks import joining
from tests.support.training import make_trainer, short_recipe, small_splits

SETTINGS = {
    "fedlas_ls": {"clip": 0.3, "loss_options": {"alpha": 0.5}},
    "crl": {},
    "ce": {"augment": True, "batch": 26},  # one image is left over, and shares are equal
}
"""Losses, and changes to the recipe."""


def shared_splits():
    return small_splits(train=27)


def start_two_processes(folder):
    """Train in two processes that write into a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_work, args=(rank, port, folder)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        process.kill()  # if it hangs
    errors = [(folder / f"{rank}.err").read_text() for rank in (0, 1)]
    assert [process.exitcode for process in processes] == [0, 0], errors


def _work(rank, port, folder):
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    with (
        open(f"{rank}.out", "w") as out,
        open(f"{rank}.err", "w") as err,
        redirect_stdout(out),
        redirect_stderr(err),
        joining() as ranks,
    ):
        assert ranks == (rank, 2)
        for loss, changes in SETTINGS.items():
            torch.save(_train(loss, changes, Path(f"{loss}-{rank}")), f"{loss}-{rank}.pt")
        results.AFTER = ("none",)  # type: ignore[assignment]
        options = "--loss ce --network tiny --epochs 1 --batch 512 --device cpu"
        main(options.split())


def _train(loss, changes, folder):
    recipe = short_recipe(**{"loss": loss, "epochs": 2, "batch": 10, **changes})
    trainer = make_trainer(folder, recipe, shared_splits())
    start = copy.deepcopy((trainer.network.state_dict(), trainer.loss.state_dict()))
    order: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    trainer.loss.register_forward_hook(lambda _, args, __: order.append(args[3].clone()))
    trainer.network.backbone.register_forward_pre_hook(
        lambda module, args: inputs.append(args[0].clone()) if module.training else None
    )
    trainer.run()
    return {
        "start": start,
        "order": order,
        "inputs": inputs,
        "log": trainer.log,
        "network": trainer.network.state_dict(),
        "loss": trainer.loss.state_dict(),
        "files": sorted(path.name for path in folder.iterdir()),
    }
