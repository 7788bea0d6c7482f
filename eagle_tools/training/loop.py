"""The training loop of all models: it resumes, shows a progress bar, and plots loss curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from eagle_tools.training.data_parallel import add_up, copy_first, is_first, share
from eagle_tools.training.fingerprint import differences

# Parts of names of matrices that AdamW trains.
_ADAM = ("embed", "lm_head", "edges.before", "edges.after", "edges.to_scores", "confidence", "router", "shared_gate")
_MATRIX = 2  # dimensions


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then a cosine down to a twentieth of it."""

    steps: int
    peak: float
    warmup: int = 100

    @classmethod
    def of(cls, steps: int, peak: float) -> Schedule:
        """Warms up for 100 steps, or for a fifth of a short training."""
        return cls(steps, peak, warmup=min(100, steps // 5 + 1))

    def rate(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@dataclass(frozen=True)
class Optimizers:
    """Muon for hidden matrices (orthogonalized momentum), AdamW for tables by token, heads, norms and biases."""

    muon: torch.optim.Optimizer
    adam: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module) -> Optimizers:
        plain: list[nn.Parameter] = []
        hidden: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_plain = parameter.dim() != _MATRIX or any(part in name for part in _ADAM)
                (plain if is_plain else hidden).append(parameter)
        return cls(
            torch.optim.Muon(hidden, lr=0.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(plain, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, rate: float) -> None:
        for optimizer in (self.muon, self.adam):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, dict[str, object]]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


@dataclass
class History:
    """The curves to plot: (step, value) pairs by curve name."""

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.curves.setdefault(name, []).append((step, value))


@dataclass(frozen=True)
class Job:
    """One training run. `loss(step)` returns the loss and numbers to plot; `evaluate()` returns more numbers.

    inputs: what the result depends on besides the number of steps, in plain values. A checkpoint from other inputs is
        not continued.
    warm: the weights are those of a trained head. So one that gets no gradient is not random, and they are evaluated
        before the first step.
    best_by: the number of `evaluate` by whose maximum the weights are chosen that stay; None: the last ones stay.
    accumulate: losses per step. Their gradients are averaged; `loss` counts all of them. Processes share them, see
        `data_parallel`.
    """

    name: str
    model: nn.Module
    directory: Path
    schedule: Schedule
    loss: Callable[[int], tuple[Tensor, dict[str, float]]]
    evaluate: Callable[[], dict[str, float]]
    inputs: Mapping[str, Any]
    log_every: int = 10
    save_every: int = 100
    warm: bool = False
    best_by: str | None = None
    accumulate: int = 1


@dataclass
class Progress:
    """Where a training stands, besides its weights.

    untouched: the parameters that got no gradient yet. best: {"value", "model"} of the best weights so far, on the CPU.
    """

    untouched: set[str]
    step: int = 0
    best: dict[str, Any] | None = None

    def keep_best(self, model: nn.Module, value: float) -> None:
        """Copy the weights if `value` is the highest so far."""
        if self.best is None or value > self.best["value"]:
            weights = {name: value.to("cpu", copy=True) for name, value in _trained(model).items()}
            self.best = {"value": value, "model": weights}


def train(job: Job) -> History:
    """Run `job` to its last step. It resumes from a checkpoint in `directory`, if there is one.

    Of several processes only the first one evaluates, writes, and has the best weights at the end.

    Raises:
        ValueError: the checkpoint is of a training from other inputs, or of more steps; or some weights were not
            trained.
    """
    job.directory.mkdir(parents=True, exist_ok=True)
    optimizers, history = Optimizers.of(job.model), History()
    progress = Progress(set(_trained(job.model)))
    _resume(job, optimizers, history, progress)
    first, steps = progress.step, job.schedule.steps
    bar = tqdm(range(first, steps), initial=first, total=steps, desc=job.name, unit="step")
    parameters = [p for p in job.model.parameters() if p.requires_grad]
    copy_first(parameters)
    if job.warm and first == 0 and is_first():
        _evaluate(job, history, progress)
    for step in bar:
        loss, numbers = _backward(job, parameters, step)
        _note_gradients(job.model, progress.untouched)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizers.step(job.schedule.rate(step))
        if step % job.log_every == 0:
            values = {"train loss": float(loss), **numbers}
            history.add(step, values)
            bar.set_postfix({name: f"{value:.3f}" for name, value in values.items()})
        if (step + 1) % job.save_every == 0 or step + 1 == steps:
            progress.step = step + 1
            if not is_first():
                continue
            _evaluate(job, history, progress)
            _save(job, optimizers, history, progress)
            plot(history, job.directory / f"{job.name}-loss.png", job.name)
    if progress.untouched and not job.warm:
        names = ", ".join(sorted(progress.untouched))
        raise ValueError(f"{job.name}: {names}: never got a gradient, so it is as it began")
    if progress.best is not None:
        _put(job.model, progress.best["model"])
    return history


def best_point(history: History, name: str) -> tuple[int, float]:
    """(step, value) of the first highest value of a curve."""
    return max(history.curves[name], key=lambda point: point[1])


def _evaluate(job: Job, history: History, progress: Progress) -> None:
    found = job.evaluate()
    history.add(progress.step, found)
    if job.best_by is not None:
        progress.keep_best(job.model, found[job.best_by])


def _backward(job: Job, parameters: Sequence[nn.Parameter], step: int) -> tuple[Tensor, dict[str, float]]:
    """The mean of the losses of a step, whose gradients are added up, and the last one's numbers."""
    total = torch.zeros(())
    numbers: dict[str, float] = {}
    for part in share(range(step * job.accumulate, (step + 1) * job.accumulate)):
        loss, numbers = job.loss(part)
        (loss / job.accumulate).backward()
        total = total.to(loss.device) + loss.detach() / job.accumulate
    return add_up(parameters, total), numbers


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def _note_gradients(model: nn.Module, untouched: set[str]) -> None:
    """Remove from `untouched` the parameters that have a gradient now. After the first steps nothing is left."""
    if untouched:
        gradients = {name: p.grad for name, p in model.named_parameters() if name in untouched}
        untouched -= {name for name, grad in gradients.items() if grad is not None and bool(grad.any())}


def plot(history: History, path: Path, title: str) -> None:
    """The curves as a PNG with one panel each for losses, lengths, and rates in [0, 1]."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[str]] = {"cross-entropy": [], "rate": [], "tokens": []}
    for name in history.curves:
        panels["cross-entropy" if "loss" in name else "tokens" if "length" in name else "rate"].append(name)
    shown = {label: names for label, names in panels.items() if names}
    figure, axes = plt.subplots(1, len(shown), figsize=(5 * len(shown), 4), dpi=80, squeeze=False)
    for axis, (label, names) in zip(axes[0], shown.items(), strict=True):
        for name in names:
            points = history.curves[name]
            axis.plot(*zip(*points, strict=True), label=f"{name}: {points[-1][1]:.3f}", linewidth=1)
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend(
            fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2
        )  # outside, so that it covers no curve
    figure.suptitle(title)
    figure.subplots_adjust(wspace=0.4)
    figure.savefig(path, bbox_inches="tight")  # with all of the legends
    plt.close(figure)


def _checkpoint(job: Job) -> Path:
    return job.directory / f"{job.name}-checkpoint.pt"


def _save(job: Job, optimizers: Optimizers, history: History, progress: Progress) -> None:
    state = {
        "step": progress.step,
        "inputs": dict(job.inputs),
        "model": _trained(job.model),
        "optimizers": optimizers.state_dict(),
        "untouched": sorted(progress.untouched),
        "best": progress.best,
    }
    temporary = _checkpoint(job).with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(_checkpoint(job))
    (job.directory / f"{job.name}-history.json").write_text(json.dumps(history.curves))


def restore(model: nn.Module, checkpoint: Path) -> dict[str, Any]:
    """Load the parameters of `model` from a training checkpoint; returns the checkpoint."""
    state: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    _put(model, state["model"])
    return state


@torch.no_grad()
def _put(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        parameters[name].copy_(value)


def read_history(path: Path) -> History:
    """The curves saved with a checkpoint."""
    curves = json.loads(path.read_text())
    return History({name: [(int(step), float(value)) for step, value in points] for name, points in curves.items()})


def _resume(job: Job, optimizers: Optimizers, history: History, progress: Progress) -> None:
    if not _checkpoint(job).is_file():
        return
    _check_checkpoint(job)
    state = restore(job.model, _checkpoint(job))
    optimizers.load_state_dict(state["optimizers"])
    progress.step, progress.best = int(state["step"]), state.get("best")
    progress.untouched &= set(state.get("untouched", ()))
    history.curves.update(read_history(job.directory / f"{job.name}-history.json").curves)


def _check_checkpoint(job: Job) -> None:
    path = _checkpoint(job)
    state: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    if changed := differences(state.get("inputs", {}), job.inputs):
        raise ValueError(f"{path}: the checkpoint of a training with other inputs ({', '.join(changed)}); delete it")
    if state["step"] > job.schedule.steps:
        raise ValueError(f"{path}: already at step {state['step']}, beyond the {job.schedule.steps} asked for")
