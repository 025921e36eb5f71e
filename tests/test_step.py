"""`WindowStep` alone, without a Trainer: the gradient of a window, its forwards, its memory and its refusals."""

import copy
import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers import models
from helpers.parity import Draws, key_of, set_random_state
from helpers.trainers import arguments
from torch import Tensor, nn

from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.processes.signals import Phases
from hf_infcl.step.step import WindowStep
from hf_infcl.step.terms import Context
from hf_infcl.step.window import Window
from hf_infcl.trainer.construction import prepare_model


def step_of(folder: Any, model: nn.Module, **options: Any) -> WindowStep:
    args = arguments(folder, **options)
    accelerator = Accelerator(cpu=True)
    prepare_model(model, args, accelerator)
    context = Context(DualEncoder(model), accelerator, args, "exclude", lambda batch: batch)
    return WindowStep(context, model, phases=Phases())


def window_of(data: models.Pairs, count: int) -> Window:
    """The pairs in micro-batches of equal size."""
    batches = [data.batch(rows.tolist()) for rows in torch.arange(len(data)).chunk(count)]
    if data.ids is not None:
        batches = [{**b, "pair_ids": ids} for b, ids in zip(batches, data.ids.chunk(count), strict=True)]
    return Window(batches, rows_at=lambda places: [10 + row for _, row in places])


def run(step: WindowStep, window: Window) -> Tensor:
    """The loss of a window, whose gradient is added to the parameters'."""
    return step.run(window, 0)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("repeats", [0, 2])
@pytest.mark.parametrize("build", [models.clip, models.siglip])
def test_the_gradient_of_a_window_is_that_of_plain_autograd(tmp_path, build, repeats):
    data = models.Pairs(8, repeats=repeats)
    plain = build()
    encoder = DualEncoder(plain)
    encoder.initialise_sigmoid()
    embeds, temperature = encoder.embed(plain, data.batch()), encoder.scale_and_bias()
    expected = reference.contrastive_loss(*embeds, *temperature, objective=encoder.kind.objective, pair_ids=data.ids)
    expected.backward()
    whole = torch.stack([g.norm() for g in gradients(plain).values()]).norm()
    for count in (1, 2, 4):
        model = build()
        loss = run(step_of(tmp_path, model), window_of(data, count))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert gradients(model).keys() == gradients(plain).keys()
        for name, gradient in gradients(plain).items():
            assert (gradients(model)[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * whole, name


@pytest.mark.parametrize(
    ("option", "forwards"),
    [
        ({"retain_graphs": "0"}, 7),
        ({"retain_graphs": "1"}, 7),
        ({"retain_graphs": "2"}, 6),
        ({"retain_graphs": "3"}, 5),
        ({"retain_graphs": "4"}, 4),
        ({"retain_graphs": 9}, 4),
        ({"retain_graphs": "auto"}, None),
        ({"offload_inputs": True}, None),
    ],
)
def test_retained_graphs_spare_forwards_and_change_nothing_as_offloading(tmp_path, option, forwards):
    found, runs = [], []
    for options in ({}, option):
        model = models.clip(dropout=0.3)
        step = step_of(tmp_path, model, **options)
        hook = model.register_forward_pre_hook(lambda *args: runs.append(1))
        runs.clear()
        torch.manual_seed(0)
        run(step, window_of(models.Pairs(8), 4))
        hook.remove()
        found.append(gradients(model))
    plain, other = found
    assert forwards in (None, len(runs))
    assert all(torch.equal(other[name], gradient) for name, gradient in plain.items())


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_frozen_tower_runs_once_per_window(tmp_path, tower):
    model, runs = models.clip(dropout=0.3), []
    frozen = {"image": model.vision_model, "text": model.text_model}[tower]
    next(frozen.children()).register_forward_pre_hook(lambda *args: runs.append(1))
    run(step_of(tmp_path, model, freeze=tower), window_of(models.Pairs(8), 4))
    assert len(runs) == 4
    still = {"image": ("vision_model", "visual_projection"), "text": ("text_model", "text_projection")}[tower]
    assert gradients(model).keys() == {name for name, _ in model.named_parameters() if not name.startswith(still)}


@pytest.mark.parametrize("retain", ["0", "1", "3", "4"])
def test_batch_norms_advance_once_for_each_micro_batch(tmp_path, retain):
    torch.manual_seed(0)
    model = models.groupvit()
    plain = copy.deepcopy(model).train()
    step, window = step_of(tmp_path, model, retain_graphs=retain), window_of(models.Pairs(16), 4)
    batches, draws = [dict(batch) for batch in window.batches], Draws(model)
    run(step, window)
    for batch in batches:
        set_random_state(draws.states[key_of(batch["input_ids"])], torch.device("cpu"))
        plain(**batch)
    assert plain.visual_projection[1].num_batches_tracked == 4
    for (name, expected), seen in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(seen, expected), name


def test_images_are_let_go_after_their_last_use(tmp_path):
    model, window = models.clip(), window_of(models.Pairs(8), 2)
    run(step_of(tmp_path, model), window)
    assert all("pixel_values" not in batch and "input_ids" in batch for batch in window.batches)


def test_a_loss_that_is_not_finite_stops_before_it_does_harm(tmp_path):
    data, model = models.Pairs(8), models.clip()
    data.images[5] = torch.nan
    message = (
        "^The loss of the global batch after step 0 is nan, because these are not finite: rank 0: image embeddings of "
        r"micro-batch 1, row 1 \(11 of the training set\)\. The weights are those after the last step\."
    )
    with pytest.raises(ValueError, match=message):
        run(step_of(tmp_path, model), window_of(data, 2))
    assert not gradients(model)


def test_windows_are_skipped_and_counted(tmp_path):
    """The last loss is told again; a scale that a step has moved too far is limited."""
    bad, model = models.Pairs(8), models.clip()
    bad.images[5] = torch.nan
    step = step_of(tmp_path, model, skip_nonfinite=1)
    loss = run(step, window_of(models.Pairs(8), 2))
    with torch.no_grad():
        model.logit_scale.fill_(math.log(3000))
    step.after_optimizer_step(torch.optim.SGD(model.parameters()))
    assert model.logit_scale.exp().item() == pytest.approx(100)
    before = {name: gradient.clone() for name, gradient in gradients(model).items()}
    assert run(step, window_of(bad, 2)) == loss
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(model).items())
    step.after_optimizer_step(torch.optim.SGD(model.parameters()))
    assert (step.windows, step.checks.skipped, step.checks.last_loss) == (1, 1, loss.item())
    with pytest.raises(ValueError, match="Steps skipped just before it: 1"):
        run(step, window_of(bad, 2))
