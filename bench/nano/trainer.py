"""One stage of training as an object: parameters, optimizers, windows, the loss curve; resumable.

Knows no command line and no folder layout beyond one state file.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bench.nano.lessons import Lesson, Lessons, stacked
from bench.nano.model import Nano
from bench.nano.optimizer import Adam, Master, Muon
from bench.nano.shape import Recipe, Shape
from bench.nano.stream import Windows


@dataclass(frozen=True, slots=True)
class Point:
    """One step of the loss curve, in nats per token of text, and of answers where lessons are taught."""

    step: int
    loss: float
    mtp_loss: float
    answer_loss: float | None = None


class Trainer:
    """Owns the model while it learns: a new one of `shape`, or one that has learnt before."""

    def __init__(
        self, start: Shape | Nano, recipe: Recipe, pieces: list[np.ndarray], lessons: Lessons | None = None
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.pieces, self.lessons, self.step = recipe, pieces, lessons, 0
        self.seconds = 0.0
        self.curve: list[Point] = []
        self.model = Nano(start) if isinstance(start, Shape) else start
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith(recipe.learns))
        self.masters = {name: Master(p) for name, p in self.model.named_parameters() if p.requires_grad}
        small = {name: self._small_rate(name, m) for name, m in self.masters.items()}
        self.muon = Muon(m for name, m in self.masters.items() if small[name] == 0.0)
        self.adam = Adam((m, small[name]) for name, m in self.masters.items() if small[name] > 0.0)
        for name, parameter in self.model.named_parameters():
            if parameter.ndim >= 2 and not name.endswith("mlp.gate"):
                parameter.data = parameter.data.bfloat16()

    def _small_rate(self, name: str, master: Master) -> float:
        """Adam's rate for this parameter; zero for what Muon steps."""
        special = {"embed": self.recipe.embed_lr, "head": self.recipe.head_lr}
        if name in special:
            return special[name]
        return self.recipe.small_lr if master.value.ndim < 2 or name.endswith("mlp.gate") else 0.0

    def run(self) -> Iterator[Point]:
        """Train to the last step, yielding a point per step."""
        taught = iter(self.lessons) if self.lessons else None
        for step in range(self.step):
            self._lesson(taught, step)
        while self.step < self.recipe.steps:
            phase = self.recipe.phase(self.step)
            begin = next(s for s in range(self.step + 1) if self.recipe.phase(s) == phase)
            rows = self.recipe.text_rows(self.step)
            feed = iter(Windows(self.pieces, phase.length, rows, self.recipe.seed))
            for _ in range(self.step - begin):
                next(feed)
            while self.step < self.recipe.steps and self.recipe.phase(self.step) == phase:
                yield self._advance(next(feed), self._lesson(taught, self.step))

    def _lesson(self, taught: Iterator[Lesson] | None, step: int) -> Lesson | None:
        rows = self.recipe.lesson_rows(step)
        return stacked(islice(taught, rows)) if taught and rows else None

    def _advance(self, window: Tensor, lesson: Lesson | None) -> Point:
        begun = time.process_time()
        main, mtp = self._learn(window)
        answer = None if lesson is None else round(self._learn(lesson.ids, lesson.counts)[0], 4)
        factor = self.recipe.rate(self.step)
        rate, decay = self.recipe.muon_lr * factor, self.recipe.decay(self.step)
        self.muon.step(rate, self.recipe.momentum(self.step), decay)
        self.adam.step(factor, self.step + 1)
        self._steer(self.recipe.bias_step * factor)
        self.step += 1
        self.seconds += time.process_time() - begun
        self.curve.append(Point(self.step, round(main, 4), round(mtp, 4), answer))
        return self.curve[-1]

    def _learn(self, window: Tensor, counts: Tensor | None = None) -> tuple[float, float]:
        """Add the gradients of both losses of a window, or of that of drafts."""
        if self.recipe.chain:
            main, mtp = self.model.draft_losses(window, counts, self.recipe.chain)
        else:
            main, mtp = self.model.losses(window, counts)
        (main + self.recipe.mtp_weight * mtp).backward()
        return main.item(), mtp.item()

    def _steer(self, size: float) -> None:
        """Nudge the routers' biases, only for experts outside the band: skew stays, starvation does not."""
        low, high = self.recipe.band
        for moe in self.model.moes():
            share = moe.load / moe.load.mean()
            if moe.gate.requires_grad:
                moe.bias += size * ((share < low).float() - (share > high).float())
            moe.load.zero_()

    def save(self, path: Path) -> None:
        """Everything a resumed run needs, in one safetensors file."""
        tensors = {f"{n}/{k}": v for n, m in self.masters.items() for k, v in m.state().items()}
        biases = {f"bias/{i}": moe.bias for i, moe in enumerate(self.model.moes())}
        curve = json.dumps([asdict(point) for point in self.curve])
        facts = {"step": str(self.step), "seconds": str(self.seconds), "curve": curve}
        save_file({**tensors, **biases}, str(path), metadata=facts)

    def resume(self, path: Path) -> None:
        """Continue from a state file written by `save`."""
        with safe_open(str(path), "pt") as file:
            for name, master in self.masters.items():
                for key, tensor in master.state().items():
                    tensor.copy_(file.get_tensor(f"{name}/{key}"))
                master.publish()
            for i, moe in enumerate(self.model.moes()):
                moe.bias.copy_(file.get_tensor(f"bias/{i}"))
            facts = file.metadata()
        self.step, self.seconds = int(facts["step"]), float(facts["seconds"])
        self.curve = [Point(**point) for point in json.loads(facts["curve"])]
