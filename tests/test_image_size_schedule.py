"""Smaller images first: each step has its size, whatever the data road, and what is saved is of the full size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset, Features, Image, Value
from helpers import models
from helpers.pictures import LETTERS, file_of
from helpers.processors import clip_processor
from helpers.shards import write_tar
from helpers.trainers import StopAt, arguments, parameters, trained, trainer_for
from PIL import Image as Picture
from torch.utils.data import Subset
from transformers import TrainerCallback

from hf_infcl import ContrastiveCollator, ImageTextDataset, ImageTextStream, InfCLTrainer
from hf_infcl.data.images import decode_rgb, least_side
from hf_infcl.encoders.dual_encoder import DualEncoder
from hf_infcl.encoders.image_size import OtherSizes
from hf_infcl.options.batch_schedule import EqualBatches
from hf_infcl.options.image_sizes import ImageSizes

SCHEDULE = ["8:0.4", "16:0.4", "24"]
FULL = {"image_size": 24, "image_size_schedule": SCHEDULE, "max_steps": 5, "learning_rate": 0.01}


def jpeg(row: int, size: tuple[int, int] = (60, 48)) -> bytes:
    pixels = np.random.default_rng(row).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return file_of(Picture.fromarray(pixels), "jpeg")


def pairs(**options: Any) -> ImageTextDataset:
    rows = [{"bytes": jpeg(row), "path": None} for row in range(24)]
    features = Features({"image": Image(), "caption": Value("string")})
    columns = {"image": rows, "caption": list(LETTERS[:24])}
    return ImageTextDataset(Dataset.from_dict(columns, features=features), **options)


def stream(folder: Path) -> ImageTextStream:
    for shard in range(2):
        members = []
        for row in range(12 * shard, 12 * shard + 12):
            members += [(f"{row:03}.jpg", jpeg(row)), (f"{row:03}.txt", LETTERS[row].encode())]
        write_tar(folder / f"{shard}.tar", members)
    return ImageTextStream(str(folder / "{0..1}.tar"), shuffle_buffer=8, seed=3)


class Seen(TrainerCallback):
    """The sizes of the images that arrive at the device, and those that the tower gets, in each step."""

    def __init__(self) -> None:
        self.arrived: list[set[int]] = [set()]
        self.encoded: list[set[int]] = [set()]

    def watch(self, trainer: InfCLTrainer) -> InfCLTrainer:
        def embeds(module: Any, args: Any, given: Any) -> None:
            if trainer.model.training:
                self.encoded[-1].add((args[0] if args else given["pixel_values"]).shape[-1])

        prepare = trainer._prepare_inputs

        def prepared(inputs: dict[str, Any]) -> dict[str, Any]:
            self.arrived[-1].add(inputs["pixel_values"].shape[-1])
            return prepare(inputs)

        trainer._prepare_inputs = prepared  # type: ignore[method-assign]
        trainer.model.vision_model.embeddings.register_forward_pre_hook(embeds, with_kwargs=True)
        return trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.arrived.append(set())
        self.encoded.append(set())


def trainer_of(folder: Path, data: Any, model: Any = None, **options: Any) -> InfCLTrainer:
    options = {"save_strategy": "steps", "save_steps": 1, **FULL, **options}
    options |= {"processing_class": clip_processor(), "data_collator": None}
    return trainer_for(folder, model or models.clip(dropout=0.1), data, **options)


# ---- The schedule ----


def test_each_step_has_the_size_of_its_share():
    sizes = ImageSizes.of(["112:0.5", "160:0.4", "224"], EqualBatches(8, steps=20))
    assert [sizes.at(step) for step in range(20)] == [112] * 10 + [160] * 8 + [224] * 2
    assert (sizes.smaller_at(0), sizes.smaller_at(19), sizes.sizes[-1]) == (112, None, 224)


@pytest.mark.parametrize(
    "words", [[], ["224"], ["112:0.5", "224:0.5"], ["112", "224"], ["112:1.5", "224"], ["112:0.6", "160:0.4", "224"]]
)
def test_words_that_are_no_schedule_are_refused(tmp_path, words):
    with pytest.raises(ValueError, match=r"image_size_schedule must be sizes with their shares .* such as 112:0.5"):
        arguments(tmp_path, image_size_schedule=words)


@pytest.mark.parametrize("words", ["0:0.5 16", "8:0.5 8", "24:0.5 16"])
def test_sizes_that_do_not_grow_are_refused(tmp_path, words):
    with pytest.raises(ValueError, match=f"sizes of at least one pixel that grow, got {words}"):
        arguments(tmp_path, image_size_schedule=words)


@pytest.mark.parametrize(
    ("build", "schedule", "options", "message"),
    [
        (models.clip, "12:0.5 16", {}, "12 in image_size_schedule is no multiple of the patches"),
        (models.clip, "8:0.5 24", {}, r"ends with 24, and the model is of 16 .* image_size=24"),
        (models.clip, "8:0.5 24", {"image_size": 32}, "ends with 24, and image_size is 32"),
        (
            *(models.clip, "8:0.5 16", {"freeze": "image", "cache_features": "features"}),
            "exclude each other: the cache has the features of images of one size",
        ),
        (models.BUILD["aimv2"], "8:0.5 16", {}, r"\(type 'aimv2_vision_model'\) does not offer"),
        (models.BUILD["siglip2"], "8:0.5 16", {}, "takes images of any size"),
        (models.two_towers, "8:0.5 16", {}, "cannot be interpolated"),
    ],
)
def test_trainings_that_cannot_have_several_sizes_are_refused(tmp_path, build, schedule, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, build(), image_size_schedule=schedule.split(), **options)


# ---- Towers ----

KINDS = {kind: build for kind, build in models.BUILD.items() if kind not in ("siglip2", "aimv2")}
KINDS["dinov2"] = models.vision_text_dinov2


@pytest.mark.parametrize("kind", KINDS)
def test_every_tower_takes_other_sizes_and_its_positions_get_their_gradient(kind):
    model, images = KINDS[kind]().eval(), torch.randn(2, 3, 32, 32)
    encoder = DualEncoder(model)
    other = torch.randn(2, 3, 24, 24)
    before = None if kind in ("align",) else encoder.encode_images({"pixel_values": images[..., :16, :16]})
    sizes = OtherSizes(encoder)
    features = encoder.encode_images({"pixel_values": other})
    if kind not in ("groupvit",):
        expected = model.get_image_features(pixel_values=other, interpolate_pos_encoding=True).pooler_output
        torch.testing.assert_close(features, torch.nn.functional.normalize(expected, dim=-1))
    features.square().sum().backward()
    positions = [p for name, p in model.vision_model.named_parameters() if "position_embedding" in name]
    assert all(p.grad is not None and p.grad.shape == p.shape for p in positions)
    sizes.remove()
    if before is not None:
        torch.testing.assert_close(encoder.encode_images({"pixel_values": images[..., :16, :16]}), before)


# ---- Trainings ----


@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_have_the_size_of_their_step_also_after_a_resume(tmp_path, workers):
    options = {"dataloader_num_workers": workers, "dataloader_prefetch_factor": 4 if workers else None}
    seen, model = Seen(), models.clip(dropout=0.1)
    whole = seen.watch(trainer_of(tmp_path / "whole", pairs(augmentation="crop"), model, callbacks=[seen], **options))
    budget = whole.window_step.memory.graph_budget
    whole.train()
    expected = [{8}, {8}, {16}, {16}, {24}, set()]
    assert (seen.arrived, seen.encoded) == (expected, expected), "the workers read ahead across the changes"
    assert whole.window_step.memory.graph_budget is not budget, "graphs of another size are measured again"
    for step in (1, 2, 3) if workers == 0 else (2,):
        place = tmp_path / str(step)
        trainer_of(place, pairs(augmentation="crop"), callbacks=[StopAt(step)], **options).train()
        resumed = trainer_of(place, pairs(augmentation="crop"), models.clip(dropout=0.1, seed=3), **options)
        resumed.train(resume_from_checkpoint=True)
        assert torch.equal(parameters(resumed), parameters(whole)), step
    loaded = transformers.CLIPModel.from_pretrained(tmp_path / "whole/checkpoint-1").eval()
    with torch.no_grad():
        assert loaded.get_image_features(pixel_values=torch.zeros(1, 3, 24, 24)).pooler_output.isfinite().all()
    with pytest.raises(ValueError, match="doesn't match model"):
        model.eval()(**models.Pairs(2).batch())  # after the training, the tower is as it was


@pytest.mark.parametrize("replay", [False, True])
def test_a_stream_and_replayed_pairs_have_the_size_of_their_step(tmp_path, replay):
    data = stream(tmp_path)
    more = {"replay_dataset": pairs()} if replay else {}
    seen = Seen()
    whole = seen.watch(trainer_of(tmp_path / "whole", data, callbacks=[seen], **more, dataloader_num_workers=1))
    whole.train()
    assert seen.arrived == seen.encoded == [{8}, {8}, {16}, {16}, {24}, set()]
    trainer_of(tmp_path / "half", data, callbacks=[StopAt(3)], **more).train()
    resumed = trained(trainer_of(tmp_path / "half", data, models.clip(dropout=0.1, seed=3), **more), resume=True)
    assert torch.equal(parameters(resumed), parameters(whole))


@pytest.mark.parametrize("data", [Subset(pairs(), range(20)), None], ids=["wrapped", "tensors"])
def test_images_from_elsewhere_are_resized_on_the_device(tmp_path, data):
    seen = Seen()
    if data is None:  # of the model's own collator
        options = {"callbacks": [seen], "image_size_schedule": ["8:0.5", "16"]}
        trainer, full = trainer_for(tmp_path, models.clip(), **options), [{16}, {16}]
        expected = [{8}, {16}]
    else:
        trainer, full = trainer_of(tmp_path, data, callbacks=[seen], max_steps=2), [{24}, {24}]
        expected = [{8}, {16}]
    seen.watch(trainer).train()
    assert seen.arrived[:2] == full
    assert seen.encoded[:2] == expected


def test_evaluations_and_other_options_compose(tmp_path):
    options = {"patch_dropout": 0.5, "full_tokens_last": 0.2, "gradient_checkpointing": True, "keep_features": 0.1}
    options |= {"eval_dataset": pairs(), "eval_strategy": "steps", "eval_steps": 1, "retain_graphs": "2"}
    seen, options["data_collator"] = Seen(), ContrastiveCollator(clip_processor(), uint8=True)
    trainer = trainer_for(tmp_path, models.clip(dropout=0.1), pairs(), callbacks=[seen], **FULL, **options)
    seen.watch(trainer).train()
    assert seen.encoded[:5] == [{8}, {8}, {16}, {16}, {24}]
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert len(losses) == 5, "evaluations see the full size"


def rank_trains(rank: int, world_size: int, folder: str) -> torch.Tensor:
    options = {"per_device_train_batch_size": 4 // world_size, "image_size_schedule": ["8:0.5", "16"], "max_steps": 4}
    trainer = trained(trainer_for(folder, models.clip(), optim="sgd", learning_rate=0.1, **options))
    return parameters(trainer)


def test_two_processes_train_as_one(ranks, tmp_path):
    (alone,) = ranks.run(rank_trains, 1, str(tmp_path))
    for found in ranks.run(rank_trains, 2, str(tmp_path)):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_is_compiled_for_each_size(tmp_path):
    from helpers.parity import Draws

    torch.manual_seed(0)
    model = models.clip(dropout=0.1)
    Draws(model)  # fails where the passes differ
    options = {"torch_compile": True, "torch_compile_backend": "eager", "image_size_schedule": ["8:0.5", "16"]}
    trainer_for(tmp_path, model, **options).train()


# ---- Decoding ----


def test_jpegs_are_decoded_at_a_part_of_their_size():
    encoded = jpeg(0, (500, 376))
    assert decode_rgb(encoded, least_side(None, None)).shape == (376, 500, 3)
    assert decode_rgb(encoded, least_side(None, 112)).shape == (188, 250, 3)
    assert decode_rgb(encoded, least_side(None, 160)).shape == (376, 500, 3), "half would be less than 200"
    assert least_side(100, 112) == 100, "what the user allows"
    row = next(iter(pairs()))
    assert "side" not in row
