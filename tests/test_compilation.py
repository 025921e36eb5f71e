"""Layers that are compiled for the steps of a training: the same weights, few graphs, and what becomes of failures."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf
from helpers import models
from helpers.processes import on_ranks
from helpers.trainers import StopAt, parameters, trained, trainer_for
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import default_collate
from transformers import TrainerCallback
from transformers.activations import QuickGELUActivation

from hf_infcl import InfCLTrainer
from hf_infcl.options.record import RunRecord
from hf_infcl.step import compilation

LAYERS = 3
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "optim": "sgd"}


def clip() -> tf.CLIPModel:
    return models.clip_with({"num_hidden_layers": LAYERS}, {"num_hidden_layers": LAYERS})


class Compiler:
    """A backend of `torch.compile` that counts the graphs of forwards and the calls of what it has compiled."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled = aot_eager(graph, inputs)
        self.graphs.append(graph)

        def called(*args: Any) -> Any:
            self.calls += 1
            return compiled(*args)

        return called


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Compiles the layers of any training on a CPU."""
    counting = Compiler()
    compile_layers(monkeypatch, counting)
    torch._dynamo.reset()
    yield counting
    torch._dynamo.reset()


def compile_layers(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    monkeypatch.setattr(compilation, "can_fuse", lambda device, backend: True)
    monkeypatch.setattr(compilation, "ENOUGH", 0.0)
    monkeypatch.setattr(compilation, "BACKEND", backend)


def run(folder: Any, model: Any = None, resume: Any = None, **options: Any) -> InfCLTrainer:
    return trained(trainer_for(folder, clip() if model is None else model, **options), resume)


def called(trainer: InfCLTrainer) -> list[torch.nn.Module]:
    """The layers that would call what is compiled now."""
    return [module for module in trainer.model.modules() if module._compiled_call_impl is not None]


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(clip(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))


def hooked() -> tf.CLIPModel:
    """A model with hooks that its other layers do not have."""
    model = clip()
    model.vision_model.encoder.layers[0].register_forward_pre_hook(lambda layer, inputs: (1.1 * inputs[0], *inputs[1:]))
    model.text_model.encoder.layers[1].mlp.register_forward_hook(lambda mlp, inputs, output: 0.9 * output)
    return model


class HooksLater(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.text_model.encoder.layers[0].mlp.register_forward_hook(lambda mlp, inputs, output: 0.9 * output)


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({}, 2),
        ({"bf16": True, "retain_graphs": "2"}, 2),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}, 2),
        ({"gradient_checkpointing": True}, 2),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, 4),
        ({"freeze": "image"}, 2),
        ({"freeze_layers": 1}, 6),
        ({"model": lora}, 4),
        ({"patch_dropout": 0.5}, 3),
        ({"texts_at_once": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}, 2),
        ({"eval_dataset": models.Pairs(10), "eval_on_start": True, **EVALUATED}, 2),  # the last batch has 2 rows
        ({"optimizer": "muon"}, 2),
        ({"model": models.siglip}, 2),
        ({"model": hooked, "callbacks": [HooksLater()]}, 2),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_weights_are_those_of_layers_as_they_are(tmp_path, compiler, options, graphs):
    options = dict(options)
    build = options.pop("model", clip)
    options = {"max_steps": 3, **options}
    expected = run(tmp_path, build(), **options, torch_compile=False)
    assert (expected.window_step.compilation.decided, compiler.calls) == (compilation.NOTHING, 0)
    trainer = run(tmp_path, build(), **options)
    assert trainer.window_step.compilation.decided == compilation.LAYERS
    assert len(compiler.graphs) <= graphs
    assert not called(trainer)
    assert torch.equal(parameters(trainer), parameters(expected))
    steps = trainer.args.gradient_accumulation_steps * 3
    assert compiler.calls >= steps * (1 if build is models.siglip else LAYERS), "of one tower at least"


def trimmed(rows: Any) -> Any:
    """A batch whose texts are as long as its longest one."""
    batch = default_collate(rows)
    longest = int(batch["attention_mask"].sum(1).max())
    return {name: value[:, :longest] if value.ndim == 2 else value for name, value in batch.items()}


def test_constant_shapes_are_compiled_as_such_and_varying_texts_once(tmp_path, compiler):
    run(tmp_path)
    assert not any(isinstance(value, torch.SymInt) for graph in compiler.graphs for value in sizes(graph))
    compiler.graphs.clear()
    options = {"data": models.Pairs(40, longest=9), "max_steps": 5, "per_device_train_batch_size": 2}
    trainer = run(tmp_path, **options, data_collator=trimmed)
    assert 3 <= len(compiler.graphs) <= 4, "one more for all lengths of texts"
    assert torch.equal(
        parameters(trainer), parameters(run(tmp_path, **options, data_collator=trimmed, torch_compile=False))
    )


def sizes(graph: torch.fx.GraphModule) -> Iterator[Any]:
    for node in graph.graph.nodes:
        if node.op == "placeholder" and isinstance(value := node.meta.get("example_value"), torch.Tensor):
            yield from value.shape


def test_a_frozen_tower_runs_once(tmp_path, compiler):
    model, runs = clip(), []
    model.vision_model.encoder.register_forward_hook(lambda *_: runs.append(1))
    run(tmp_path, model, freeze="image", max_steps=1, gradient_accumulation_steps=4)
    assert len(runs) == 4 + 1, "and for the trial before the first step"


@pytest.mark.parametrize(
    ("options", "seconds", "decided"),
    [({}, 1e9, compilation.NOTHING), ({"torch_compile": False}, 0.0, compilation.NOTHING)],
)
def test_short_trainings_and_those_that_say_so_compile_nothing(
    tmp_path, compiler, monkeypatch, capsys, options, seconds, decided
):
    monkeypatch.setattr(compilation, "ENOUGH", seconds)
    trainer = run(tmp_path, **options)
    assert trainer.window_step.compilation.decided == decided
    assert not compiler.graphs


def test_a_user_s_own_compilation_stays(tmp_path, compiler):
    model = clip()
    model.compile(backend="eager")
    assert run(tmp_path, model).window_step.compilation.decided == compilation.MODEL
    assert not compiler.graphs


# ---- Failures ----


def failing(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    raise RuntimeError("no compiler")


def failing_in_backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=failing)(graph, inputs)


@pytest.mark.parametrize("backend", [failing, failing_in_backward])
def test_a_training_goes_on_without_a_compiler_that_fails(tmp_path, monkeypatch, caplog, backend):
    expected = parameters(run(tmp_path))
    torch._dynamo.reset()
    compile_layers(monkeypatch, backend)
    with mock.patch.object(compilation.logger, "warning") as told:
        trainer = run(tmp_path)
    assert trainer.window_step.compilation.decided == compilation.NOTHING
    assert torch.equal(parameters(trainer), expected)
    ((message,), _), *others = told.call_args_list
    assert "The layers could not be compiled, and are computed as they are" in message
    assert "no compiler" in message
    assert not others


def test_an_error_of_a_step_leaves_nothing_compiled(tmp_path, compiler):
    trainer = trainer_for(tmp_path, clip())
    with (
        mock.patch.object(type(trainer.window_step), "run", side_effect=RuntimeError("within")),
        pytest.raises(RuntimeError, match="within"),
    ):
        trainer.train()
    assert not called(trainer)


@on_ranks(2)
def test_processes_compile_alike_or_not_at_all(rank, world_size, tmp_path):
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for backend in (None, aot_eager, failing if rank else aot_eager):
            torch._dynamo.reset()
            if backend is not None:
                compile_layers(monkeypatch, backend)
            trainer = run(tmp_path, data=models.Pairs(64), max_steps=2)
            found.append((trainer.window_step.compilation.decided, parameters(trainer)))
    assert [decided for decided, _ in found] == [compilation.NOTHING, compilation.LAYERS, compilation.NOTHING]
    for _, weights in found:
        assert torch.equal(weights, found[0][1])


# ---- Sums of rows ----


def sums_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums of rows, as of a bias's gradient, and others."""
    return x.sum([0], keepdim=True), x.sum([0], keepdim=True, dtype=torch.float32), x.sum([0]), x.sum([1], keepdim=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_sum_the_rows_of_gradients_of_half_precision(device, dtype):
    x = 1 + torch.randn(3_000, 24, device=device).to(dtype)
    traced = make_fx(sums_of, tracing_mode="symbolic")(x)
    for node in traced.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    compilation.BiasSums()(traced.graph)
    traced.recompile()
    products = [node for node in traced.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) == (0 if dtype == torch.float32 else 2)
    for rows in (x, x[:1_700]):  # the graph is one of any number of rows
        for got, want in zip(traced(rows), sums_of(rows), strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
        exact = rows.double().sum(0)
        for got in traced(rows)[:2]:
            assert ((got[0] - exact).norm() / exact.norm()).item() < torch.finfo(dtype).eps


def test_a_sum_with_more_digits_than_its_rows_stays_where_no_gradient_is_summed():
    """Products replace sums that autograd rounds, and those that return no more digits than a product."""
    graphs = []

    def compiled(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append([node for node in graph.graph.nodes if node.target is torch.ops.aten.sum.dim_IntList])
        compilation.BiasSums()(graph.graph)
        graph.recompile()
        return graph.forward

    layer, x = torch.nn.Linear(24, 24, dtype=torch.bfloat16), 1 + torch.randn(3_000, 24).bfloat16()
    backend = aot_autograd(fw_compiler=compiled, bw_compiler=compiled)
    output, *sums = torch.compile(lambda x: (layer(x), *sums_of(x)[:2]), backend=backend)(x)
    output.backward(x)
    of_forward, of_backward = graphs
    assert (len(of_forward), [node.meta["partitioner_tag"] for node in of_backward]) == (2, ["is_backward"])
    assert torch.equal(sums[1], sums_of(x)[1])
    for rounded in (sums[0], layer.bias.grad):
        torch.testing.assert_close(rounded.float().view_as(sums[1]), sums[1], rtol=2**-8, atol=0.0)


@pytest.mark.gpu
def test_on_a_gpu_the_compiler_sums_the_gradients_of_biases_by_products():
    products = []

    class Counted(compilation.BiasSums):
        def __call__(self, graph: torch.fx.Graph) -> None:
            before = len(graph.nodes)
            super().__call__(graph)
            products.append(len(graph.nodes) > before)

    layer, x = torch.nn.Linear(64, 64, device="cuda"), torch.randn(4, 50, 64, device="cuda")
    with (
        mock.patch.object(compilation, "BiasSums", Counted),
        torch._inductor.config.patch(force_disable_caches=True),
        torch.autocast("cuda", torch.bfloat16),
    ):
        compilation._compiled("image", [layer])[layer](x).sum().backward()
    assert products == [False, True]  # of the forward's graph and of the backward's


# ---- Resumes ----


def test_a_resume_does_what_the_training_did(tmp_path, compiler, monkeypatch):
    whole = parameters(run(tmp_path / "whole", **SAVING))
    run(tmp_path / "parts", **SAVING, callbacks=[StopAt(2)])
    checkpoint = str(tmp_path / "parts/checkpoint-2")
    record = RunRecord.read(checkpoint)
    assert record is not None
    assert record.compiled == compilation.LAYERS
    monkeypatch.setattr(compilation, "ENOUGH", 1e9)  # what is left is short
    compiler.graphs.clear()
    with mock.patch.object(compilation.logger, "warning") as told:
        resumed = run(tmp_path / "parts", **SAVING, resume=checkpoint)
    assert (resumed.window_step.compilation.decided, len(compiler.graphs)) == (compilation.LAYERS, 2)
    assert torch.equal(parameters(resumed), whole)
    assert "were compiled in" in told.call_args.args[0]
    with mock.patch.object(compilation.logger, "warning") as told:
        resumed = run(tmp_path / "parts", **SAVING, resume=checkpoint, torch_compile=False)
    assert resumed.window_step.compilation.decided == compilation.NOTHING
    assert "compiled layers, and this one compiles nothing: it goes on, but not to the bit" in told.call_args.args[0]


def test_a_resume_of_a_training_that_compiled_nothing_compiles_nothing(tmp_path, compiler):
    run(tmp_path, **SAVING, torch_compile=False, callbacks=[StopAt(2)])
    checkpoint = str(tmp_path / "checkpoint-2")
    with mock.patch.object(compilation.logger, "warning") as told:
        resumed = run(tmp_path, **SAVING, resume=checkpoint)
    assert (resumed.window_step.compilation.decided, compiler.graphs) == (compilation.NOTHING, [])
    assert not told.called
    with mock.patch.object(compilation.logger, "warning") as told:
        run(tmp_path, **SAVING, resume=checkpoint, torch_compile=True, torch_compile_backend="eager")
    told.assert_called_once()
    assert "compiled nothing, and this one compiles model" in told.call_args.args[0]


# ---- On a GPU ----


@pytest.mark.gpu
@on_ranks(1, backend="nccl", timeout=300)
def test_on_a_gpu_the_gradients_are_those_of_layers_as_they_are(rank, world_size, tmp_path):
    options = {"max_steps": 3, "use_cpu": False, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
    for more in ({}, {"bf16": True}):
        with pytest.MonkeyPatch.context() as monkeypatch:
            expected = run(tmp_path, **options, **more, torch_compile=False)
            monkeypatch.setattr(compilation, "ENOUGH", 0.0)
            trainer = run(tmp_path, data=models.Pairs(40), **options, **more)
        assert trainer.window_step.compilation.decided == compilation.LAYERS
        assert not any(type(module) is QuickGELUActivation for module in trainer.model.modules())
        start = torch.nn.utils.parameters_to_vector(clip().parameters()).to(trainer.args.device)
        change = parameters(expected) - start
        assert (parameters(trainer) - parameters(expected)).norm() < (0.03 if more else 1e-4) * change.norm()


@pytest.mark.gpu
@on_ranks(1, backend="nccl", timeout=300)
def test_on_a_gpu_twenty_steps_are_as_near_to_fp32_as_those_of_layers_as_they_are(rank, world_size, tmp_path):
    """What rounds in other places ends elsewhere; fp32 says how far bf16 alone leads away."""
    kinds: dict[str, dict[str, Any]] = {
        "fp32": {"torch_compile": False},
        "eager": {"bf16": True, "torch_compile": False},
    }
    losses, weights = {}, {}
    for kind, options in (kinds | {"compiled": {"bf16": True}}).items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(compilation, "ENOUGH", 0.0)
            trainer = run(tmp_path, max_steps=20, use_cpu=False, learning_rate=1e-3, logging_steps=1, **options)
        assert trainer.window_step.compilation.decided == (
            compilation.LAYERS if kind == "compiled" else compilation.NOTHING
        )
        losses[kind] = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        weights[kind] = parameters(trainer)
    assert len(losses["fp32"]) == 20
    for found, least in ((losses, 1e-3), (weights, 0.0)):
        away = {kind: (found[kind] - found["fp32"]).norm().item() for kind in ("eager", "compiled")}
        print("away from fp32", away, "of", found["fp32"].norm().item())
        assert away["compiled"] <= 1.5 * away["eager"] + least


@pytest.mark.gpu
@on_ranks(1, backend="nccl", timeout=300)
def test_on_a_gpu_a_resume_with_texts_of_varying_lengths_goes_on_to_the_bit(rank, world_size, tmp_path):
    options: dict[str, Any] = {**SAVING, "data": models.Pairs(64, longest=9), "data_collator": trimmed, "bf16": True}
    options |= {"use_cpu": False, "learning_rate": 0.1, "optim": "adamw_torch_fused"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(compilation, "ENOUGH", 0.0)
        whole = run(tmp_path / "whole", **options)
        torch._dynamo.reset()  # as in a new process
        run(tmp_path / "parts", **options, callbacks=[StopAt(2)])
        torch._dynamo.reset()
        resumed = run(tmp_path / "parts", **options, resume=str(tmp_path / "parts/checkpoint-2"))
    assert whole.window_step.compilation.decided == resumed.window_step.compilation.decided == compilation.LAYERS
    assert torch.equal(parameters(resumed), parameters(whole))
