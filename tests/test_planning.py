"""The planner: its predictions agree with measured steps, its choices fit into memory, and its output is short."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from helpers import models, processors
from helpers.numerics import features
from helpers.shards import write_tars
from torch.utils.flop_counter import FlopCounterMode

from hf_infcl import InfCLTrainingArguments, contrastive_loss
from hf_infcl.loss.ring import Ring
from hf_infcl.optimizers.newton_schulz import orthogonalised
from hf_infcl.tools import cli, planning
from hf_infcl.tools.cli import commands
from hf_infcl.tools.planning import GIB, Choice, Counts, check_memory
from hf_infcl.tools.planning.fitting import choice_of

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def counted() -> dict[str | None, Counts]:
    """The counts of a two-layer CLIP with the widths of ViT-B/16 and its text tower, for each frozen tower or none."""
    layers = {"num_hidden_layers": 2}
    config = transformers.CLIPConfig(vision_config={**layers, "patch_size": 16}, text_config=layers)
    return {freeze: planning.count(config, freeze=freeze) for freeze in (None, "image")}


def test_predictions_hold_against_rows_that_were_not_fitted(monkeypatch):
    """Checks the rows that existed when the rates were chosen. PLAN.md also has later rows."""
    monkeypatch.syspath_prepend(SCRIPTS)
    measured = importlib.import_module("benchmarks.plan")
    steps = [step for step in measured.steps() if step.known and not step.fitted]
    assert len([step for step in steps if not step.compiles]) >= 20
    for step in steps:
        row, _, _, ms, predicted_ms, gib, predicted_gib = step
        if not step.compiles:  # compilation within a step is not predicted
            assert predicted_ms == pytest.approx(ms, rel=0.15), row
        assert predicted_gib == pytest.approx(gib, rel=0.1), row
    losses = [loss for loss in measured.losses() if loss.known and not loss.fitted]
    assert {"NVIDIA H200", "NVIDIA H100 80GB HBM3"} == {loss.row["device"] for loss in losses}
    for loss in losses:
        assert loss.predicted_ms == pytest.approx(loss.ms, rel=0.15), loss.row
    constants = planning.prediction
    of_replay = 1000 * constants.HOST_OF_REPLAY, 1000 * constants.WAIT_OF_REPLAY
    assert measured.beside_blocks(1) == pytest.approx((0, 1000 * constants.REPLAY))
    assert measured.beside_blocks(2) == pytest.approx(of_replay)
    for name, gpu in planning.GPUS.items():
        assert measured.rates(name) == pytest.approx((gpu.loss_flops / 1e12, gpu.logit * 1e12))


def test_small_losses_are_replayed_on_several_gpus_and_keep_their_memory(counted):
    small, large = Choice(2, 4096, 1), Choice(2, 4096, 16)
    assert [planning.is_replayed(512, choice) for choice in (small, large)] == [True, False]
    kept = [planning.memory(counted[None], choice).loss for choice in (small, large)]
    assert kept[0] > 0
    assert kept[1] == 0  # the peak occurs in a backward
    ms = [1000 * planning.loss_seconds(512, small, planning.GPUS["h200"], o) for o in ("softmax", "sigmoid")]
    assert max(ms) < 2  # with every kernel launched by the host it was 3.7 and 2.3


def test_muon_keeps_one_buffer_for_a_matrix_and_its_products_are_counted(counted):
    counts = counted[None]
    # In each of two layers of both towers 4 matrices of attention and 2 of the MLP, and two projections.
    assert len(counts.matrices) == 26 == 2 + len(counted["image"].matrices) * 2 - 2
    plain, muon, shared = (Choice(gpus, 256, 4, muon=muon) for gpus, muon in ((1, False), (1, True), (2, True)))
    values = sum(rows * columns for rows, columns in counts.matrices)
    assert planning.memory(counts, plain).optimizer - planning.memory(counts, muon).optimizer == 4 * values
    infinite = replace(planning.GPUS["h200"], bandwidth=math.inf, flops=1.0)
    with FlopCounterMode(display=False) as counter:
        for shape in counts.matrices:
            orthogonalised(torch.empty(1, *shape, device="meta"))
    products = planning.seconds(counts, muon, infinite)["optimizer"]
    assert products == pytest.approx(counter.get_total_flops())
    assert planning.seconds(counts, shared, infinite)["optimizer"] == pytest.approx(products / 2)
    assert planning.link_bytes(counts, shared)["matrices of Muon"] == values
    assert "--optimizer muon" in muon.options
    assert "--optimizer" not in plain.options


def rank_sends(rank: int, world_size: int, batch: int, dim: int, objective: str) -> int:
    """The bytes that this process sends around the ring for the loss of its pairs and its gradient."""
    x, y = (t.requires_grad_() for t in features(batch, dim, seed=rank, dtype=torch.bfloat16))
    with mock.patch.object(Ring, "exchange", autospec=True, side_effect=Ring.exchange) as exchange:
        contrastive_loss(x, y, 10.0, -5.0, objective=objective).backward()
    return sum(t.nbytes for call in exchange.call_args_list for t in call.args[1] if t is not None)


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_a_ring_sends_the_predicted_bytes(ranks, counted, objective):
    counts, choice, rows = replace(counted[None], objective=objective), Choice(3, 1024, 1024), 16
    assert not planning.is_gathered(counts.dim, choice)
    predicted = planning.link_bytes(counts, choice)
    texts = predicted["texts"] + predicted["gradients of the texts"]
    for sent in ranks.run(rank_sends, 3, rows, counts.dim, objective, always_ring=True):
        # Besides the features, some fp32 numbers of each text are sent.
        assert sent / rows == pytest.approx(texts / choice.rows, rel=0.01)


def test_a_kernel_waits_for_the_host_that_launches_it():
    gpu = planning.GPU("", 80.0, flops=1e12, bandwidth=1e12, launch=1.0, loss_flops=1e12, logit=0.0)
    short, long, reads = ((0.0, 0.0), (0.0, 10e12), (0.0, 0.0, True))

    def of(*operations: tuple) -> float:
        one = tuple(planning.Operation(*o) for o in operations)
        counts = Counts(1, 0, 1, 1, "softmax", 0, 0, 0, forward=one, again=(), backward=())
        return planning.seconds(counts, Choice(1, planning.ROWS, 1), gpu)["first pass"]

    assert of(short, short, short) == 3  # the time of the host
    assert of(long, short, short) == 11  # the launches after the first are hidden
    assert of(short, short, long) == 13
    assert of(long, reads, short) == 13  # nothing is launched until the value has been read


def test_what_is_chosen_fits_and_more_memory_is_no_slower(counted):
    times = []
    for gib in (2.0, 8.0, 80.0):
        setting: dict[str, Any] = {"gpus": 8, "global_batch": 32768, "gpu": planning.GPUS["h100"], "memory_gib": gib}
        found = planning.best(planning.choices({False: counted[None]}, **setting))
        assert found is not None
        time, choice = found
        assert choice.global_batch == 32768
        assert planning.memory(counted[None], choice).total <= planning.USABLE * gib * GIB
        times.append(time)
    assert times == sorted(times, reverse=True)
    with pytest.raises(ValueError, match=r"equally among 8 GPUs. Choose 1000 or 1008\."):
        list(planning.choices({False: counted[None]}, **{**setting, "global_batch": 1001}))
    assert planning.best(planning.choices({False: counted[None]}, **{**setting, "memory_gib": 0.5})) is None


def test_checkpointing_a_frozen_tower_and_fp32_change_the_counts(counted):
    config = models.clip().config
    plain = planning.count(config)
    assert plain.parameters == plain.trained == sum(p.numel() for p in models.clip().parameters())
    checkpointed = planning.count(config, checkpointing=True)
    assert checkpointed.graph < plain.graph
    assert len(checkpointed.backward) > len(plain.backward)
    assert planning.count(config, autocast=False).weight_copies == 0
    frozen = counted["image"]
    assert frozen.graph < counted[None].graph / 2
    assert len(frozen.again) < len(frozen.forward)
    with pytest.raises(ValueError, match="siglip2 have no image size"):
        planning.count(transformers.Siglip2Config())


def test_the_command_needs_the_config_alone(tmp_path, capsys):
    models.siglip().config.save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--global_batch", "4096", "--gpus", "4"]
    cli.main(words=[*command, "--dataset_size", "400000", "--plot", str(tmp_path / "plan.png")])
    said = capsys.readouterr().out
    assert "sigmoid loss" in said
    assert "is 1,024 per GPU" in said
    assert "few enough to be exchanged at once" in said
    assert "An epoch of 400,000 pairs takes 97 steps" in said
    assert "This is too few steps for a learning rate schedule" in said
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    with pytest.raises(SystemExit):
        cli.main(words=[*command, "--gpu", "a100"])
    assert "--gpu must be h100 or h200, whose rates were measured, got 'a100'. For another" in capsys.readouterr().err
    cli.main(words=[*command, "--freeze", "image", "--gpu_memory", "24"])
    said = capsys.readouterr().out
    (chosen,) = re.findall("^Choose  (.*)$", said, re.MULTILINE)
    assert chosen.endswith("--freeze image"), "the training that is planned"
    assert "on 4 × GPU with 24 GiB" in said
    assert "Times are predicted with the rates of an H100." in said
    seconds, peak = planning.measure(models.siglip().config, 4, torch.device("cpu"))
    assert seconds > 0
    assert peak == 0
    with pytest.raises(SystemExit):
        cli.main(words=[*command, "--global_batch", "4", "--gpu_memory", "0.0001"])
    assert "shard the weights with --fsdp" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(words=[*command, "--global_batch", str(10**9), "--gpu_memory", "8"])
    said = capsys.readouterr().err
    assert "Not even micro-batches of one pair fit" in said
    assert "Lower --global_batch" in said


def planned(capsys: pytest.CaptureFixture[str], model: Path, *words: Any) -> str:
    cli.main(words=["plan", "--model", str(model), *map(str, words)])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], model: Path, *words: Any) -> str:
    with pytest.raises(SystemExit):
        planned(capsys, model, *words)
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    models.clip().config.save_pretrained(folder)
    return folder


def test_the_options_of_a_training_are_kept(small_model, capsys):
    window = ["--per_device_train_batch_size", 64, "--gradient_accumulation_steps", 8]
    training = ["--dataset", "d", "--output_dir", "o", "--learning_rate", 1e-4, "--bf16", "--strategy", "gather"]
    said = planned(capsys, small_model, *window, "--gpus", 2, *training, "--retain_graphs", 3, "--offload_inputs")
    assert "A global batch of 1,024 pairs on 2 ×" in said
    kept = "--per_device_train_batch_size 64 --gradient_accumulation_steps 8 --retain_graphs 3 --offload_inputs"
    assert f"Choose  {kept} --bf16" in said
    assert "The prediction leaves out --strategy gather:" in said
    said = planned(capsys, small_model, "--global_batch", 1024, "--gradient_accumulation_steps", 4)
    assert "Choose  --per_device_train_batch_size 256 --gradient_accumulation_steps 4" in said
    assert "leaves out" not in said
    said = planned(capsys, small_model, *window, f"--{max(commands.CHECKPOINTING)}")
    assert "--gradient_checkpointing" in said
    assert "Give --global_batch, or both" in refused(capsys, small_model)
    assert "is 512, but --global_batch is 500" in refused(capsys, small_model, "--global_batch", 500, *window)
    odd = refused(capsys, small_model, "--global_batch", 1000, *window[:2])
    assert "no multiple of --gpus 1 × --per_device_train_batch_size 64, which is 64. Choose 1,024." in odd
    large = refused(capsys, small_model, *window, "--gpu_memory", 0.0001)
    assert "Micro-batches of 64 pairs do not fit" in large


def test_keeping_costs_what_it_holds(counted):
    counts = counted[None]
    plain = Choice(1, 256, 4)
    memory, seconds = planning.memory(counts, plain), planning.seconds(counts, plain, planning.GPUS["h200"])
    for name, part, more in (
        ("keep_weights", "weights", 4 * counts.trained),
        ("keep_features", "weights", 4 * counts.trained),
        ("keep_features", "features", 8 * counts.dim * plain.rows),
        ("ema", "optimizer", 4 * counts.trained),
    ):
        kept = planning.memory(counts, replace(plain, **{name: True}))
        assert getattr(kept, part) - getattr(memory, part) == more, name
    kept = planning.seconds(counts, replace(plain, keep_features=True), planning.GPUS["h200"])
    assert kept["first pass"] == pytest.approx(2 * seconds["first pass"])
    slow = replace(planning.GPUS["h200"], bandwidth=1.0)
    ema = planning.seconds(counts, replace(plain, ema=True), slow)["optimizer"]
    assert ema - planning.seconds(counts, plain, slow)["optimizer"] == pytest.approx(12 * counts.trained)
    assert planning.seconds(counts, replace(plain, ema=True, muon=True), slow)["optimizer"] == pytest.approx(
        planning.seconds(counts, replace(plain, muon=True), slow)["optimizer"] + 12 * counts.trained
    )


def test_texts_put_together_take_memory_and_save_time(counted):
    together = Choice(1, 256, 4, texts=4)
    assert together.passes_of_texts() == {4: 1, 0: 3}
    assert together.passes_of_texts(1) == {0: 3}
    assert replace(together, texts=1).passes_of_texts(1) == {1: 3}
    assert replace(together, texts=3).passes_of_texts() == {3: 1, 1: 1, 0: 2}
    assert replace(together, gpus=2).passes_of_texts(2) == {0: 1, 1: 1}
    assert replace(together, accumulation=8, gpus=2, texts=3).passes_of_texts() == {3: 2, 1: 2, 0: 4}
    counts, plain = counted[None], Choice(1, 256, 4)
    more = planning.memory(counts, together).activations - planning.memory(counts, plain).activations
    assert more == 3 * 256 / planning.ROWS * counts.texts[0] > 0
    kept = [planning.memory(counts, replace(c, retain=4)).activations for c in (plain, together)]
    assert kept[0] == kept[1], "all graphs hold the same texts"
    gpu = planning.GPUS["h100"]
    times, fewer = planning.seconds(counts, plain, gpu), planning.seconds(counts, together, gpu)
    assert fewer["first pass"] < times["first pass"]
    assert fewer["second pass"] < times["second pass"]
    assert (fewer["loss"], fewer["optimizer"]) == (times["loss"], times["optimizer"])
    assert planning.count(models.clip().config, freeze="text").texts == (0, (), ())


def test_the_plan_knows_texts_at_once(small_model, capsys):
    words = ["--per_device_train_batch_size", 64, "--gradient_accumulation_steps", 4]
    plain, together = (planned(capsys, small_model, *words, *more) for more in ((), ("--texts_at_once", 4)))
    assert "--texts_at_once 4" in together
    assert "texts_at_once" not in plain
    one = planned(capsys, small_model, *words[:3], 1, "--texts_at_once", 4)
    assert "--texts_at_once" not in one.split("infcl train")[-1], "a single micro-batch is refused with it"
    words = ["--per_device_train_batch_size", 64, "--gpus", 2, "--texts_at_once", 4, "--gradient_accumulation_steps"]
    two, three = (planned(capsys, small_model, *words, steps).split("infcl train")[-1] for steps in (2, 3))
    assert "--texts_at_once" not in two, "two micro-batches are refused with it among several processes"
    assert "--texts_at_once 4" in three
    args = InfCLTrainingArguments(use_cpu=True, gradient_accumulation_steps=4, texts_at_once=2)
    assert choice_of(args).texts == 2


def test_the_plan_knows_replay_and_averages(small_model, capsys):
    words = ["--global_batch", 1024, "--dataset_size", 10000, "--epochs", 10]
    replay = ["--replay_dataset", "old", "--replay_share", 0.25]
    plain, other = planned(capsys, small_model, *words), planned(capsys, small_model, *words, *replay)
    assert "An epoch of 10,000 pairs takes 9 steps" in plain
    assert "Replay: 256 of the 1,024 pairs are old, 768 new" in other
    assert "An epoch of 10,000 pairs takes 13 steps" in other, "of 768 new pairs each"
    assert "Replay: 512 of" in planned(capsys, small_model, *words, *replay[:2]), "the default"
    near = planned(capsys, small_model, *words, "--ema_decay", 0.99)
    far = planned(capsys, small_model, *words, "--ema_decay", 0.99, "--ema_device", "cpu")
    assert "--ema_decay 0.99" in near
    assert "--ema_decay 0.99 --ema_device cpu" in far
    assert ("leaves out --ema_device cpu" in far, "leaves out" in near) == (True, False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--epochs", 0.02], "0.02 epochs take 2 steps"),
        (["--num_train_epochs", 3], "3 epochs take 291 steps"),
        (["--max_steps", 7], "--max_steps 7 takes"),
        ([], "An epoch of 100,000 pairs takes 97 steps"),
    ],
)
def test_the_length_is_that_of_the_trainer(small_model, capsys, words, told):
    assert told in planned(capsys, small_model, "--global_batch", 1024, "--dataset_size", 100_000, *words)


def test_a_batch_that_divides_badly_leads_to_one_nearby(small_model, capsys):
    said = planned(capsys, small_model, "--global_batch", 32771)
    assert "Choose  --per_device_train_batch_size 1 --gradient_accumulation_steps 32771" in said
    assert "--global_batch 32768 takes" in said
    assert "divide badly" not in planned(capsys, small_model, "--global_batch", 32768)


def test_a_training_is_refused_only_if_it_certainly_does_not_fit(tmp_path):
    config = models.clip().config
    args = InfCLTrainingArguments(tmp_path, per_device_train_batch_size=4096, use_cpu=True, report_to="none")
    assert check_memory(config, args, 80 * GIB) is None
    counts = planning.count(config, autocast=False)
    total = planning.memory(counts, Choice(1, 4096, 1)).total
    warning = check_memory(config, args, total)
    assert warning is not None
    assert "infcl plan" in warning
    with pytest.raises(ValueError, match=r"needs about .* GiB per GPU, which has"):
        check_memory(config, args, 4.0 * counts.parameters)
    assert "was not predicted" in str(check_memory(transformers.Siglip2Config(), args, total))


def test_a_window_whose_images_do_not_fit_is_refused_unless_they_stay_in_host_memory(tmp_path):
    window = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 512, "use_cpu": True}
    args = InfCLTrainingArguments(tmp_path, **window, report_to="none")
    config, images = models.clip().config, 3 * models.IMAGE**2 * 8 * 512
    with pytest.raises(ValueError, match="--offload_inputs keeps the images in host memory"):
        check_memory(config, args, images)
    args.offload_inputs = True
    assert "--offload_inputs" not in str(check_memory(config, args, images))


# ---- On a GPU ----

GPU_NAMES = {"H100": "h100", "H200": "h200"}


@pytest.mark.gpu
@pytest.mark.parametrize(("layers", "freeze"), [(2, None), (12, None), (12, "image")])
def test_a_measured_micro_batch_takes_what_was_predicted(tmp_path, capsys, layers, freeze):
    """The tests of other workers use the same GPU, and so decide the time; it is compared if the test runs alone."""
    name = torch.cuda.get_device_name()
    gpu = next((short for part, short in GPU_NAMES.items() if part in name), None)
    if gpu is None:
        pytest.skip(f"there are no rates of a {name}")
    sizes = {"num_hidden_layers": layers}
    config = transformers.CLIPConfig(vision_config={**sizes, "patch_size": 16}, text_config=sizes)
    config.save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--global_batch", "256", "--gpu", gpu, "--measure"]
    cli.main(words=[*command, *(["--freeze", freeze] if freeze else [])])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Measured on")]
    print(line)
    gib, predicted_gib = map(float, re.findall(r"([\d.]+) GiB", line))
    assert predicted_gib == pytest.approx(gib, rel=0.1)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        ms, predicted_ms = map(float, re.findall(r"([\d.]+) ms", line))
        assert predicted_ms == pytest.approx(ms, rel=0.5)  # a single micro-batch, timed once


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Lets this process have a tenth of the GPU, because the tests beside it need the rest."""
    torch.cuda.set_per_process_memory_fraction(0.1)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.usefixtures("little_memory")
def test_a_micro_batch_beyond_the_gpu_at_hand_is_told_in_one_line(tmp_path, capsys):
    transformers.CLIPConfig(vision_config={"patch_size": 16}).save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--global_batch", "65536", "--gpu_memory", "100000", "--measure"]
    with pytest.raises(SystemExit):
        cli.main(words=command)
    assert "does not fit into this machine" in capsys.readouterr().err


@pytest.mark.gpu
def test_train_refuses_a_window_that_cannot_fit_before_it_begins(tmp_path, capsys):
    models.clip().save_pretrained(tmp_path / "model")
    processors.clip_processor().save_pretrained(tmp_path / "model")
    write_tars(tmp_path / "shards", [8])
    words = ["--model", tmp_path / "model", "--dataset", tmp_path / "shards/00000.tar", "--streaming", "--max_steps", 1]
    words += ["--output_dir", tmp_path / "out", "--report_to", "none", "--gradient_accumulation_steps", 2]
    with pytest.raises(SystemExit):
        cli.main(words=list(map(str, ["train", *words, "--per_device_train_batch_size", 10**9])))
    said = capsys.readouterr().err
    print(said)
    assert "infcl train: error: The training needs about" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
