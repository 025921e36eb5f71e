"""The trainer on GPUs: the same parity as on CPUs, over NCCL, in fp32 and bf16. Run with ``pytest -m gpu``."""

import gc
import math
import warnings
from typing import Any

import pytest
import torch
import transformers
from helpers import models
from helpers.evaluation import LabelledImages, labelled
from helpers.parity import MODELS, VARIANTS, Gradients, check
from helpers.processes import on_ranks, without_tf32
from helpers.trainers import parameters, trainer_for
from torch.nn.parallel import DistributedDataParallel

from hf_infcl.loss.strategies import STRATEGIES
from hf_infcl.step.compilation import may_compile

pytestmark = pytest.mark.gpu

CELLS = [(objective, variant, steps) for objective in MODELS for variant in (*VARIANTS, "patches") for steps in (1, 2)]


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fp32_gradients_equal_one_process(ranks, world_size, backend):
    check(ranks, world_size, CELLS, {"use_cpu": False, "backend": backend}, backend="nccl", tolerance=5e-5, floor=1e-6)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bf16_gradients_are_within_its_rounding(ranks, world_size, backend):
    options = {"use_cpu": False, "bf16": True, "backend": backend}
    cells = [cell for cell in CELLS if cell[1] != "dropout"]  # attention draws different masks in bf16 than in fp32
    check(ranks, world_size, cells, options, backend="nccl", tolerance=0.05, floor=5e-3)


OPTIONS = [
    {"retain_graphs": "3"},
    {"retain_graphs": "auto"},
    {"offload_inputs": True},
    {"gradient_checkpointing": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, *options.items())))
def test_options_do_not_change_gradients(ranks, options):
    world_size = min(2, torch.cuda.device_count())
    cells = [(objective, variant, 4) for objective in MODELS for variant in ("plain", "dropout", "frozen image")]
    check(ranks, world_size, cells, {"use_cpu": False, **options}, backend="nccl", tolerance=5e-5, floor=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "ring"])
def test_every_strategy_gives_the_same_gradients(ranks, strategy, precision):
    bounds = {"tolerance": 5e-5, "floor": 1e-6} if precision == "fp32" else {"tolerance": 0.05, "floor": 5e-3}
    cells = [(objective, variant, 2) for objective in MODELS for variant in ("pair_ids", "frozen image")]
    options = {"use_cpu": False, "strategy": strategy, "bf16": precision == "bf16"}
    check(ranks, 2, cells, options, backend="nccl", **bounds)


class Unscaled(Gradients):
    """The default initial loss scale, 65,536, is meant to overflow and to be halved; here it must not overflow."""

    def on_train_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.scaler._init_scale = 512.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_gradients_are_within_its_rounding(ranks, world_size):
    cells = [cell for cell in CELLS if cell[1] != "dropout"]
    options = {"use_cpu": False, "fp16": True, "gradients": Unscaled}
    check(ranks, world_size, cells, options, backend="nccl", tolerance=0.05, floor=5e-3)


class WithoutTF32(Gradients):
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        without_tf32()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("softmax", {}),
        ("sigmoid", {"freeze": "image"}),
        ("softmax", {"texts_at_once": 3, "gradient_accumulation_steps": 3}),
    ],
    ids=str,
)
@on_ranks(backend="nccl", timeout=300, always_ring=True)
def test_compiled_gradients_are_the_same(rank, world_size, tmp_path, objective, options):
    found = []
    for compiled in (False, True):
        seen = WithoutTF32()
        settings = {"max_steps": 1, "max_grad_norm": 0.0, "use_cpu": False, "torch_compile": compiled, **options}
        trainer_for(tmp_path, MODELS[objective](), callbacks=[seen], **settings).train()
        found.append({name.replace("_orig_mod.", ""): gradient for name, gradient in seen.seen.items()})
    plain, other = found
    assert plain.keys() == other.keys()
    whole = torch.stack([g.norm() for g in plain.values()]).norm()
    for name, gradient in plain.items():
        assert (other[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6 * whole, name


@on_ranks(1, backend="nccl", timeout=300)
def test_cuda_graphs_of_the_compiler_train_windows_of_one_micro_batch(rank, world_size, tmp_path):
    """In the first window CUDA graphs are prepared, in the second recorded, and from the third on replayed."""
    ends = []
    options = {"optim": "sgd", "learning_rate": 1e-2, "max_steps": 6, "gradient_accumulation_steps": 1}
    for mode in (None, "reduce-overhead"):
        trainer = trainer_for(tmp_path, callbacks=[WithoutTF32()], use_cpu=False, torch_compile_mode=mode, **options)
        start = parameters(trainer)
        trainer.train()
        ends.append(parameters(trainer) - start)
    plain, replayed = ends
    assert (replayed - plain).norm() <= 1e-3 * plain.norm()


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(backend="nccl")
def test_muon_trains_alike_in_every_precision(rank, world_size, tmp_path):
    """Muon's updates amplify the rounding of small gradients, so that they agree in their direction only."""
    changes = []
    options = {"optimizer": "muon", "learning_rate": 1e-3, "max_steps": 4, "use_cpu": False}
    for precision in ({}, {"bf16": True}, {"fp16": True}):
        trainer = trainer_for(tmp_path, None, models.Pairs(64 * world_size), **options, **precision)
        if precision.get("fp16"):
            trainer.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=512.0)  # which overflows nothing
        start = parameters(trainer)
        trainer.train()
        assert trainer.state.global_step == 4
        changes.append(parameters(trainer) - start)
    for change in changes[1:]:
        cosine = torch.nn.functional.cosine_similarity(change, changes[0], dim=0).item()
        print(f"cosine {cosine:.4f}")
        assert cosine > 0.7


class AfterTrials(transformers.TrainerCallback):
    """Forgets the forwards that were tried before the training."""

    def __init__(self, forwards: list[int]) -> None:
        self._forwards = forwards

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._forwards.clear()


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(backend="nccl", always_ring=True)
def test_auto_keeps_the_graphs_that_fit(rank, world_size, tmp_path):
    """The parameters after four windows, in which "auto" retains all graphs, having found that they fit.

    Where layers may be compiled, no trial finds it: the second window is measured.
    """
    options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 4, "use_cpu": False}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "texts_at_once": 1}
    ends, forwards = [], []
    for retain, compiles in (("1", False), ("auto", False), ("auto", None)):
        model, runs = models.clip(dropout=0.3), []
        model.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        options |= {"retain_graphs": retain, "torch_compile": compiles}
        trainer = trainer_for(tmp_path, model, models.Pairs(32 * world_size), **options)
        trainer.add_callback(AfterTrials(runs))
        start = parameters(trainer)
        trainer.train()
        ends.append(parameters(trainer))
        forwards.append(len(runs))
    # Under DDP the last micro-batch is always encoded again. accelerate does not wrap the model in a group of one.
    last = 5 if isinstance(trainer.model_wrapped, DistributedDataParallel) else 4
    measured = 7 * 2 + last * 2 if may_compile(trainer.args) else last * 4
    assert forwards == [7 * 4, last * 4, measured], f"{forwards} forwards"
    for end in ends[1:]:
        assert (ends[0] - end).norm() <= 1e-4 * (ends[0] - start).norm()


class PeakOfLastStep(transformers.TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps - 1:
            torch.cuda.reset_peak_memory_stats()


def peak_gib(folder: Any, micro_batches: int, *, only_last: bool = False, **options: Any) -> float:
    """The peak memory of all steps, or of the last one, of a model with large activations, weights included."""
    torch.manual_seed(0)
    layers = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**models.TEXT, **layers}, vision_config={**models.VISION, **layers, "image_size": 64}
    )
    data = models.Pairs(256 * 4 * 3 * torch.distributed.get_world_size())
    data.images = torch.nn.functional.interpolate(data.images, 64)
    of_one = {"retain_graphs": "1", "texts_at_once": 1, "gradient_accumulation_steps": micro_batches, "max_steps": 3}
    options = {**of_one, **options, "use_cpu": False, "bf16": True}
    options |= {"per_device_train_batch_size": 256, "callbacks": [PeakOfLastStep()] if only_last else []}
    trainer = trainer_for(folder, transformers.CLIPModel(config), data, **options)
    torch.compiler.reset()
    gc.collect()  # earlier trainers
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return torch.cuda.max_memory_allocated() / 2**30


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(1, backend="nccl", timeout=300)  # launched, because a process that sees several GPUs is refused
def test_a_window_takes_the_memory_of_one_micro_batch(rank, world_size, tmp_path, compiled, offload):
    options = {"torch_compile": compiled, "offload_inputs": offload}
    one = peak_gib(tmp_path, 1, **options)
    both = peak_gib(tmp_path, 4, retain_graphs="2", **options)
    assert both > 1.4 * one, "activations are too small beside the rest: the test says nothing"
    four = peak_gib(tmp_path, 4, **options)
    assert four <= 1.1 * one, f"{four:.2f} GiB for four micro-batches, {one:.2f} for one, {both:.2f} with two graphs"


# ---- Micro-batches that are found ----


def large_trainer(folder: Any, size: int, width: int = 768, **options: Any) -> Any:
    """A CLIP whose micro-batch of 256 takes about 5 GiB by default, and a global batch that is not divided yet."""
    torch.manual_seed(0)
    heads = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
    layers = {"num_hidden_layers": 12, **heads}
    text = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = transformers.CLIPConfig(
        text_config={**models.TEXT, **text},
        vision_config={**models.VISION, **layers, "image_size": 128, "patch_size": 16},
    )
    data = models.Pairs(size)
    data.images = torch.nn.functional.interpolate(data.images, 128)
    given = {"per_device_train_batch_size": None, "gradient_accumulation_steps": None, "global_batch_size": size}
    options = {**given, "max_steps": 3, "use_cpu": False, "bf16": True, **options}
    return trainer_for(folder, transformers.CLIPModel(config), data, **options)


class Hog(transformers.TrainerCallback):
    """Leaves to the third step a share of the memory that the second one has taken beyond what is reserved at rest.

    The limit is that of reserved memory, of which holes between the tensors that stay are a part: those of tests before
    may be larger than what a step takes. It is less than the tensors of a step at their peak, so memory runs out.
    """

    def __init__(self, share: float) -> None:
        self.share, self.graphs = share, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 2:
            return
        self.graphs, peak = int(args.retain_graphs), torch.cuda.max_memory_allocated()
        gc.collect()
        torch.cuda.empty_cache()
        rest, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
        assert rest < peak, "the holes of tests before have room for a whole step"
        torch.cuda.set_per_process_memory_fraction((rest + self.share * (peak - rest)) / total)


@pytest.mark.parametrize("share", [0.6, 0.1])
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(backend="nccl")
def test_what_is_found_takes_less_when_memory_runs_out(rank, world_size, tmp_path, share):
    """It keeps fewer graphs or, where not even one fits, has smaller micro-batches. Other tests have their memory."""
    try:
        options = {"callbacks": [hog := Hog(share)], "torch_compile": False}  # else graphs are counted later
        trainer = large_trainer(tmp_path, 8192 * world_size, width=192, **options)
        trainer.train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    args = trainer.args
    division = args.per_device_train_batch_size, args.gradient_accumulation_steps
    assert division == (1024, 8), "what is of use fits by far"
    assert int(args.retain_graphs) < hog.graphs, "memory ran out after the second step"
    assert (args.largest_micro_batch is None) == (share == 0.6)
    assert trainer.state.global_step == 3
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


@on_ranks(1, backend="nccl")
def test_what_is_found_fits_and_trains_as_what_is_given(rank, world_size, tmp_path):
    """With a quarter of the memory fewer graphs fit; the losses are those of options that are given."""
    losses = []
    gc.collect()
    torch.cuda.empty_cache()  # memory that an earlier test has cached is not counted against the fraction
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        for options in ({}, {"per_device_train_batch_size": 128, "retain_graphs": "1", "texts_at_once": 1}):
            trainer = large_trainer(tmp_path, 1024, max_steps=2, **options)
            trainer.train()
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
            assert trainer.args.largest_micro_batch is None, "what was found fits in all steps"
            del trainer
            gc.collect()
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def waits_of_evaluation(rank: int, world_size: int, folder: str, rows: int) -> int:
    trainer = trainer_for(folder, data_collator=LabelledImages(), use_cpu=False, per_device_eval_batch_size=4)
    trainer.evaluate(labelled(8))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            trainer.evaluate(labelled(rows))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in found)


def test_an_evaluation_does_not_wait_for_the_device_after_each_batch(ranks, tmp_path):
    (few,), (many,) = (ranks.run(waits_of_evaluation, 1, str(tmp_path), rows, backend="nccl") for rows in (16, 64))
    assert 0 < few == many
