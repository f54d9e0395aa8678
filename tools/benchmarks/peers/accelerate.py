"""https://huggingface.co/docs/accelerate/quicktour with a tracker, which gets the losses every 20 steps."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator  # type: ignore[import-not-found]

from benchmarks import job


def make(scratch: Path) -> Callable[[int], float]:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=scratch)
    accelerator.init_trackers("accelerate")
    model = job.make_model()
    optimizer = job.make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batches = itertools.cycle(job.make_batches())
    model.train()

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for step in range(steps):
            losses = model(next(batches))
            loss = losses["loss_mse"] + losses["loss_l1"]
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            if step % job.LOG_PERIOD == 0:
                accelerator.log({name: value.item() for name, value in losses.items()}, step=step)
                accelerator.print(f"step {step}: loss {loss.item():.4g}")
        return (time.perf_counter() - begin) / steps

    return run
