"""Teachers: their distance as a term of the loss, compared with plain autograd; stored, and through a map."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from datasets import Dataset, Image
from helpers import models
from helpers.demo import infcl, mistake
from helpers.numerics import descend
from helpers.open_clip_models import folder_of
from helpers.pictures import LETTERS, file_of, picture
from helpers.pictures import lettered as rows
from helpers.processors import END, clip_processor
from helpers.shards import pair, write_tar
from helpers.teachers import Reading, Running, taught_by
from helpers.trainers import FullPrecision, StopAt, arguments, parameters, trained, trainer_for, whole_weights
from helpers.wrappers import needs_fsdp
from torch import Tensor, nn

from hf_infcl import ContrastiveCollator, ImageTextDataset, ImageTextStream, InfCLTrainer
from hf_infcl.card.facts import training_settings
from hf_infcl.cli.embeddings import table_source as source_of_table
from hf_infcl.data import sources
from hf_infcl.data.sources import ShardSource, TableSource, source_of_training
from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.models.open_clip import load
from hf_infcl.quality.embedding import embed
from hf_infcl.step.terms import SIDES, TeacherDistance

BETA, RATE, ROWS = 3.0, 5e-3, 48
PLAIN = {"max_steps": 2, "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0, "optim": "sgd"}
PLAIN |= {"max_logit_scale": 1e6}
NAMELESS = {"width": None, "options": {}, "words": "a teacher", "sides": SIDES}


def build(name: str) -> nn.Module:
    return {"softmax": models.clip, "sigmoid": models.siglip}[name]()


def chosen(name: str, which: str) -> nn.Module:
    """One of the width of the student, or of another (siglip has 16 dimensions, clip 12)."""
    same, other = {"softmax": (models.clip, models.siglip), "sigmoid": (models.siglip, models.clip)}[name]
    return same(seed=1) if which == "same" else other(seed=2)


def data_of(repeats: int) -> models.Pairs:
    return models.Pairs(ROWS, repeats=repeats)


def start_of_maps(term: Any) -> list[Tensor]:
    return [p.detach().clone() for p in term.parameters()]


def expected(
    name: str, which: str, maps: list[Tensor], *, side: str = "both", weight: float = 1.0, repeats: int = 0
) -> tuple[dict[str, Tensor], list[Tensor], list[tuple[float, float]]]:
    """The weights after two steps of plain gradient descent, and the loss and the term of each."""
    model, data = build(name), data_of(repeats)
    batch, encoder = data.batch(), DualEncoder(model)
    encoder.initialise_sigmoid()
    maps = [one.clone().requires_grad_(True) for one in maps]
    sides = (0, 1) if side == "both" else (("image", "text").index(side),)
    told = []
    for _ in range(2):
        embeds, left, distance = encoder.embed(model, batch), list(maps), torch.zeros(())
        teacher = chosen(name, which).eval()
        with torch.no_grad():
            wanted = DualEncoder(teacher).embed(teacher, batch)
        for place in sides:
            student = embeds[place]
            if wanted[place].shape[1] != student.shape[1]:
                student = F.normalize(student @ left.pop(0).T, dim=-1)
            distance = distance + (student - wanted[place]).square().sum(1).mean()
        term = BETA * distance
        loss = reference.contrastive_loss(*embeds, *encoder.scale_and_bias(), objective=name, pair_ids=data.ids).sum()
        (weight * loss + term).backward()
        told.append((loss.item(), term.item()))
        descend((*model.parameters(), *maps), RATE)
    return dict(model.named_parameters()), maps, told


def rank_taught(
    rank: int, world_size: int, folder: str, name: str, which: str, steps: int, repeats: int, options: dict[str, Any]
) -> tuple[Any, ...]:
    batch = {"per_device_train_batch_size": ROWS // world_size // steps, "gradient_accumulation_steps": steps}
    student, side = build(name), options.pop("teacher_side", "both")
    teacher = Running(chosen(name, which), SIDES if side == "both" else (side,))
    options = {**PLAIN, **batch, **taught_by(teacher, student, BETA), **options}
    trainer = trainer_for(folder, student, data_of(repeats), **options)
    (term,) = trainer.context.extensions
    begin = start_of_maps(term)
    trainer.train()
    whole, logs = whole_weights(trainer.model), [entry for entry in trainer.state.log_history if "loss" in entry]
    return whole, begin, start_of_maps(term), [(entry["loss"], entry["teacher_loss"]) for entry in logs]


def near(found: Tensor, wanted: Tensor, begin: Tensor) -> bool:
    return bool((found.reshape(wanted.shape) - wanted).norm() <= 1e-4 * (wanted - begin).norm() + 1e-7)


def check(found: tuple[Any, ...], name: str, which: str, **options: Any) -> None:
    weights, begin, end, told = found
    assert len(begin) == (0 if which == "same" else 2 if options.get("side", "both") == "both" else 1)
    weights_expected, maps_expected, told_expected = expected(name, which, begin, **options)
    for values, wanted in zip(told, told_expected, strict=True):
        assert values == pytest.approx(wanted, rel=1e-4)
    start = dict(build(name).named_parameters())
    for key, wanted in weights_expected.items():
        assert near(weights[key], wanted, start[key]), key
    for one, wanted, before in zip(end, maps_expected, begin, strict=True):
        assert near(one, wanted, before)
        assert not torch.equal(one, before)


@pytest.mark.parametrize("which", ["same", "map"])
@pytest.mark.parametrize(("name", "world_size", "steps"), [("softmax", 1, 4), ("softmax", 3, 2), ("sigmoid", 2, 2)])
def test_steps_with_teachers_are_those_of_autograd(ranks, tmp_path, name, which, world_size, steps):
    for found in ranks.run(rank_taught, world_size, str(tmp_path), name, which, steps, 0, {}, always_ring=True):
        check(found, name, which)


@pytest.mark.parametrize(
    ("which", "repeats", "options"),
    [
        ("map", 0, {"teacher_side": "image"}),
        ("map", 3, {"teacher_side": "text"}),
        ("same", 0, {"contrastive_weight": 0.5}),
        ("map", 0, {"contrastive_weight": 0.0}),
        ("map", 0, {"texts_at_once": 2, "retain_graphs": "2"}),
        ("same", 0, {"offload_inputs": True}),
    ],
    ids=["image", "text and pair ids", "half", "alone", "texts at once", "offloaded"],
)
def test_sides_and_weights(tmp_path, which, repeats, options):
    found = rank_taught(0, 1, str(tmp_path), "softmax", which, 4, repeats, dict(options))
    given = {"side": options.get("teacher_side", "both"), "weight": options.get("contrastive_weight", 1.0)}
    check(found, "softmax", which, **given, repeats=repeats)


def rank_clipped(rank: int, world_size: int, folder: str, most: float) -> tuple[Tensor, float]:
    """One step of plain descent with rate 1: the weights' change and the maps', and the logged norm of the gradient."""
    batch = {"per_device_train_batch_size": ROWS // world_size // 2, "gradient_accumulation_steps": 2}
    student = build("softmax")
    taught = taught_by(Running(chosen("softmax", "map"), SIDES), student, BETA)
    options = {**PLAIN, **batch, **taught, "max_steps": 1, "learning_rate": 1.0}
    trainer = trainer_for(folder, student, data_of(0), **options | {"max_grad_norm": most})
    start = [one.detach().clone() for one in (*trainer.model.parameters(), *start_of_maps_of(trainer))]
    trainer.train()
    trained = *whole_weights(trainer.model).values(), *start_of_maps_of(trainer)
    change = [(one - before).flatten() for one, before in zip(trained, start, strict=True)]
    return torch.cat(change), next(entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradients_of_model_and_map_are_clipped_as_one(ranks, tmp_path, world_size):
    (whole, norm), (clipped, same_norm) = (
        ranks.run(rank_clipped, world_size, str(tmp_path), most)[0] for most in (0.0, 0.1)
    )
    assert norm == pytest.approx(same_norm, rel=1e-4) == pytest.approx(whole.norm().item(), rel=1e-4)
    assert norm > 0.2
    torch.testing.assert_close(clipped, whole * 0.1 / norm, rtol=1e-3, atol=1e-6)


def rank_sharded(rank: int, world_size: int, folder: str, which: str) -> tuple[Any, ...]:
    return rank_taught(rank, world_size, folder, "softmax", which, 2, 0, {"use_cpu": False, "fsdp": True})


@needs_fsdp
def test_sharded_parameters_have_the_same_steps_and_no_map(fresh_ranks, tmp_path):
    for found in fresh_ranks.run(rank_sharded, 2, str(tmp_path), "same"):
        check(found, "softmax", "same")
    store(table_source(rows()), tmp_path / "stored")
    with pytest.raises(Exception, match="needs a linear map beside the model, whose optimizer FSDP shards"):
        fresh_ranks.run(rank_resumed, 2, str(tmp_path), True)


def rank_resumed(rank: int, world_size: int, folder: str, sharded: bool) -> tuple[Tensor, list[float]]:
    """Stops after two of four steps and resumes; in fp32, also on GPUs."""
    given: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 12 // world_size // 2}
    given |= {"learning_rate": 2e-3, "optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2}
    given |= {"fsdp": True, "use_cpu": False} if sharded else {}
    out, callback = Path(folder, f"run {sharded}"), FullPrecision()
    given["teacher_embeddings"] = f"{folder}/stored"

    def made(*callbacks: Any) -> InfCLTrainer:
        return taught(out, ImageTextDataset(rows()), callbacks=[callback, *callbacks], **given)

    made(StopAt(2)).train()
    trainer = trained(made(), resume=True)
    weights = [weight.cpu().flatten() for weight in whole_weights(trainer.model).values()]
    return torch.cat(weights), [entry["teacher_loss"] for entry in trainer.state.log_history if "loss" in entry]


@needs_fsdp
def test_a_resumed_training_of_sharded_parameters_has_the_steps_of_ddp(fresh_ranks, ranks, tmp_path, backend):
    store(table_source(rows()), tmp_path / "stored", models.clip(seed=1, end=END), clip_processor())
    (sharded, losses), (whole, expected_losses) = (
        group.run(rank_resumed, 2, str(tmp_path), group is fresh_ranks, backend=backend)[0]
        for group in (fresh_ranks, ranks)
    )
    start = nn.utils.parameters_to_vector(models.clip(end=END).parameters()).detach()
    # The gradient of a key's bias is only rounding, which Adam turns into steps.
    assert (sharded - whole).norm() <= 0.1 * (whole - start).norm()
    assert len(losses) == 4
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert losses[0] > losses[-1] > 0


def test_a_teacher_of_the_start_is_keep_features(tmp_path):
    student = models.clip()
    kept = trained(trainer_for(tmp_path, **PLAIN, keep_features=BETA))
    taught = trained(trainer_for(tmp_path, student, **PLAIN, **taught_by(Running(models.clip(), SIDES), student, BETA)))
    alone = trained(trainer_for(tmp_path, **PLAIN))
    assert (parameters(alone) - parameters(kept)).abs().max() > 1e-4
    # Rounding depends on the processor: on one of them, which fails with 1e-8, one of 9,377 differs by 1.7e-8.
    torch.testing.assert_close(parameters(taught), parameters(kept), rtol=1e-6, atol=1e-7)


# ---- Teachers with their own processor, and stored embeddings ----


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(sources, "ROWS_OF_PART", 8)


def large_processor() -> Any:
    """Of images of 32 pixels, and captions of four tokens."""
    processor = clip_processor(model_max_length=4)
    processor.image_processor.size, processor.image_processor.crop_size = (
        {"shortest_edge": 32},
        {"height": 32, "width": 32},
    )
    return processor


def large_teacher() -> Any:
    text = {"max_position_embeddings": 4, "eos_token_id": END}
    return models.clip_with(text, {"image_size": 32}, seed=3, width=20)


def store(
    source: Any, folder: Path, teacher: Any = None, processor: Any = None, format: str = "npy", half: bool = False
) -> str:
    model = (large_teacher() if teacher is None else teacher).eval()
    collator = ContrastiveCollator.for_model(large_processor() if processor is None else processor, model.config)
    trainer = trainer_for(folder, model, data_collator=collator, per_device_eval_batch_size=4)
    embed(source, folder, trainer.context, format=format, half=half)
    return str(folder)


def table_source(table: Dataset, **options: Any) -> TableSource:
    return source_of_table(table, "image", "caption", None, "", **options)


def taught(folder: Path, data: Any, *, model: Any = None, **options: Any) -> InfCLTrainer:
    given = {**PLAIN, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 4}
    given |= {"processing_class": clip_processor(), "data_collator": None}
    given |= {"teacher_weight": BETA} if options.keys() & {"teacher", "teacher_embeddings"} else {}
    return trainer_for(folder, models.clip(end=END) if model is None else model, data, **given | options)


def reading(items: Any, student: nn.Module | None = None) -> dict[str, Any]:
    """The options of a training whose teacher runs beside the student, and reads these items with its own processor."""
    every = [{"image": np.array(item["image"]), "caption": item["caption"]} for item in items]
    teacher = Reading(large_teacher(), large_processor(), every, clip_processor())
    return taught_by(teacher, models.clip(end=END) if student is None else student, BETA, seed=42)


def moved(trainer: InfCLTrainer) -> Tensor:
    return parameters(trainer) - nn.utils.parameters_to_vector(models.clip(end=END).parameters())


@pytest.mark.parametrize(
    ("options", "half"),
    [
        ({"captions_per_image": 2}, False),
        ({"captions_per_image": 2}, True),
        ({"augmentation": "none", "on_bad_sample": "skip"}, False),
    ],
    ids=["captions", "fp16", "skip"],
)
def test_stored_equals_online_on_images_that_are_not_augmented(tmp_path, options, half):
    data = ImageTextDataset(rows(), **options)
    folder = store(table_source(rows()), tmp_path / "stored", half=half)
    online = trained(taught(tmp_path / "a", data, **reading(rows())))
    stored = trained(taught(tmp_path / "b", data, teacher_embeddings=folder, dataloader_num_workers=1))
    plain = trained(taught(tmp_path / "c", data))
    error = (moved(online) - moved(stored)).norm() / (moved(online) - moved(plain)).norm()
    assert error < (2e-3 if half else 1e-4)
    parts = [f"-{part:05}-of-00003{suffix}" for part in range(3) for suffix in (".json", ".npy")]
    assert [path.name for path in sorted(Path(folder).glob("*"))] == [
        "embeddings.json",
        *(f"{kind}{name}" for kind in ("images", "texts") for name in (*parts, ".index.npy")),
    ]


def shards_of(folder: Path, count: int = 24) -> str:
    """Two shards of pictures of 20 × 24 pixels."""
    for shard in range(2):
        members = []
        for number in range(shard, count, 2):
            texts = json.dumps({"caption": [LETTERS[number % 26] + " b"]}).encode()
            members += [(f"{number:03d}.png", file_of(picture(number, (20, 24)))), (f"{number:03d}.json", texts)]
        write_tar(folder / f"shards/{shard}.tar", members)
    return str(folder / "shards/*.tar")


def test_embeddings_of_a_whole_table_are_found_where_rows_were_excluded(tmp_path):
    """Each row by its number in the whole table."""
    whole, kept = ImageTextDataset(rows()), np.array([0, 2, *range(5, 24)])

    def part() -> ImageTextDataset:
        data = ImageTextDataset(rows().select(kept))
        data.whole, data.numbers = whole, kept
        return data

    folder = store(source_of_training(whole), tmp_path / "whole")
    stored = taught(tmp_path / "a", part(), teacher_embeddings=folder, dataloader_num_workers=1, max_steps=2)
    online = taught(tmp_path / "b", part(), **reading(rows()), max_steps=2)
    plain = taught(tmp_path / "c", part(), max_steps=2)
    for trainer in (stored, online, plain):
        trainer.train()
    assert (moved(online) - moved(stored)).norm() < 1e-3 * (moved(online) - moved(plain)).norm()
    own = store(source_of_training(part()), tmp_path / "part")
    taught(tmp_path, part(), teacher_embeddings=own)  # its own are found too
    with pytest.raises(ValueError, match="rows of the set were 24 and are 21"):
        taught(tmp_path, ImageTextDataset(rows().select(kept)), teacher_embeddings=folder)


def written(model: Any, processor: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["table", "stream", "replay"])
def test_a_teacher_embeds_the_training_set_once(tmp_path, kind):
    """Into output_dir, where a second start finds the embeddings, and computes what is missing."""
    name = written(large_teacher(), large_processor(), tmp_path / "large")
    (tmp_path / "large" / "README.md").write_text("---\nlicense: mit\n---\n")

    def data() -> dict[str, Any]:
        if kind == "stream":
            return {"data": ImageTextStream(shards_of(tmp_path), shuffle_buffer=4, lanes=2)}
        old = {"replay_dataset": ImageTextDataset(rows(30, 50), augmentation="crop")} if kind == "replay" else {}
        return {"data": ImageTextDataset(rows(), augmentation="crop"), **old}

    named = trained(taught(tmp_path / "a", **data(), teacher=name, max_steps=2))
    folders = sorted((tmp_path / "a" / "_teacher").iterdir())
    assert len(folders) == (2 if kind == "replay" else 1)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "_teacher").rglob("*-0000*.npy")}
    first = next(iter(files))
    others = [path for path in files if path.parent != first.parent or path.name[-18:] != first.name[-18:]]
    first.unlink()
    again = trained(taught(tmp_path / "a", **data(), teacher=name, max_steps=2))
    assert {path: path.stat().st_mtime_ns for path in others} == {path: files[path] for path in others}
    assert first.exists()
    folder = tmp_path / "stored"
    new, *old = data().values()
    for number, source in enumerate([new, *old]):
        store(source_of_training(source), folder / str(number))
    given = trained(taught(tmp_path / "b", **data(), teacher_embeddings=str(folder), max_steps=2))
    assert torch.equal(parameters(again), parameters(named))
    torch.testing.assert_close(parameters(given), parameters(named), rtol=1e-5, atol=1e-6)
    rows_of_card = training_settings(named)
    assert rows_of_card["teacher"] == "large (licence mit), whose embeddings were stored"
    logged = [entry["teacher_loss"] / BETA for entry in named.state.log_history if "teacher_loss" in entry]
    expected_row = f"{logged[0]:.3g} in the first log, {logged[-1]:.3g} in the last"
    assert rows_of_card["distance to the teacher"] == expected_row
    assert rows_of_card["taught by"] == (
        "squared distance of the image and text embeddings to the teacher's, weight 3, through a linear map that was "
        "trained and is not saved"
    )
    # ---- Another teacher has a folder of its own ----
    other = written(models.clip(seed=5, end=END), clip_processor(), tmp_path / "other")
    taught(tmp_path / "a", **data(), teacher=other)
    assert len([*(tmp_path / "a" / "_teacher").iterdir()]) == 2 * len(folders)


def test_a_teacher_of_open_clip_reads_with_its_own_tokenizer(tmp_path):
    folder = folder_of("end of text", tmp_path / "open_clip")
    model, processor, _ = load(str(folder))
    stored = store(table_source(rows()), tmp_path / "stored", model, processor)
    named = trained(taught(tmp_path / "a", ImageTextDataset(rows()), teacher=str(folder), max_steps=2))
    given = trained(taught(tmp_path / "b", ImageTextDataset(rows()), teacher_embeddings=stored, max_steps=2))
    assert torch.equal(parameters(named), parameters(given))
    assert named.context.extensions[0].teacher.width == 16


def rank_stored(rank: int, world_size: int, folder: str, kind: str, options: dict[str, Any]) -> Tensor:
    path = Path(folder)
    data: Any = ImageTextDataset(rows(), pair_id_column="id")
    if kind == "stream":
        data = ImageTextStream(str(path / "shards/*.tar"), seed=1, shuffle_buffer=4, lanes=2)
    sets = {"replay_dataset": ImageTextDataset(rows(30, 50), pair_id_column="id")} if kind == "replay" else {}
    batch = {"per_device_train_batch_size": 12 // world_size // 2, "gradient_accumulation_steps": 2}
    return parameters(trained(taught(path / "run", data, **sets, **batch, **options)))


@pytest.mark.parametrize("kind", ["stream", "replay", "table"])
def test_embeddings_are_found_in_every_kind_of_data_on_any_number_of_processes(ranks, tmp_path, kind):
    """The same steps as with the teacher itself."""
    if kind == "stream":
        for shard in range(2):
            members = [m for n in range(12) for m in pair(12 * shard + n, caption=[LETTERS[n], LETTERS[n + 1]])]
            write_tar(tmp_path / f"shards/{shard}.tar", members)
        new: Any = ShardSource(ImageTextStream(str(tmp_path / "shards/*.tar")))
    else:
        new = table_source(rows())
    store(new, tmp_path / "stored" / "new")
    items = [*rows()]
    if kind == "stream":
        stream = ImageTextStream(str(tmp_path / "shards/*.tar"), captions_per_image=2, lanes=2, shuffle_buffer=2)
        items = [item for _, item in zip(range(48), stream, strict=False)]
    if kind == "replay":
        store(table_source(rows(30, 50)), tmp_path / "stored" / "old")
        items += [*rows(30, 50)]
    given = {"teacher_embeddings": str(tmp_path / "stored")}
    (one,) = ranks.run(rank_stored, 1, str(tmp_path), kind, given)
    for found in ranks.run(rank_stored, 2, str(tmp_path), kind, given):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=2e-6)
    (other,) = ranks.run(rank_stored, 1, str(tmp_path), kind, {})
    with_model = rank_stored(0, 1, str(tmp_path), kind, reading(items))
    start = nn.utils.parameters_to_vector(models.clip(end=END).parameters())
    assert (one - with_model).norm() <= 1e-4 * (one - start).norm()
    assert (one - other).norm() > 0.05 * (one - start).norm()


def test_captions_of_an_image_add_up():
    features, wanted = ([F.normalize(torch.randn(n, 12), dim=-1) for n in (3, 5)] for _ in range(2))
    value = TeacherDistance(SimpleNamespace(**NAMELESS, partial=False), BETA).value(tuple(features), tuple(wanted))
    distances = [(f - w).square().sum() for f, w in zip(features, wanted, strict=True)]
    torch.testing.assert_close(value, BETA * (distances[0] + distances[1]) / 3)


def test_pairs_without_an_embedding_are_left_to_the_contrastive_loss(tmp_path):
    """The mean is that over the others: the gradient of the term does not shrink with the share of new pairs."""
    term = TeacherDistance(SimpleNamespace(**NAMELESS, partial=True), BETA)
    features = tuple(F.normalize(torch.randn(n, 12), dim=-1) for n in (3, 5))
    wanted = [F.normalize(torch.randn(n, 12), dim=-1) for n in (3, 5)]
    known = torch.tensor([True, True, False]), torch.tensor([True, True, True, False, False])
    names = "teacher_images", "teacher_texts", "teacher_known_images", "teacher_known_texts"
    inputs = dict(zip(names, (*wanted, *known), strict=True))
    value = term.value(features, term.reference(inputs, {}))
    distances = [(f - w).square().sum(1) for f, w in zip(features, wanted, strict=True)]
    torch.testing.assert_close(value, BETA * (distances[0][:2].sum() + distances[1][:3].sum()) / 2)
    inputs |= {name: torch.zeros_like(inputs[name]) for name in names[2:]}
    assert term.value(features, term.reference(inputs, {})) == 0


def damaged(folder: str, change: Any) -> None:
    """Changes the embeddings of the images of the rows 0 to 7."""
    path = Path(folder, "images-00000-of-00003.npy")
    np.save(path, change(np.load(path)))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("moved", "has no embeddings.json, so it holds no embeddings of `infcl embed`. Was it moved"),
        ("parquet", "are in the format 'parquet', in which a training cannot look up single ones"),
        ("other data", "are of other data than the training set: images were"),
        ("fewer rows", r"data than the training set: rows of the set were 24 and are 20\. Embed"),
        ("other order", "are of other data than the training set: images were"),
        ("missing rows", r"no stored embedding of the teacher: 1 of the 24 rows of the dataset with columns"),
        ("no old", r"no stored embedding of the teacher: 30 of the 30 rows of the dataset with columns"),
        ("nan", r"The embedding of '\d+' in .* \(images\) is not finite, so the file is damaged"),
        ("zero", r"The embedding of '\d+' in .* \(images\) is zero, so the file is damaged"),
        ("index", r"The files of images in .* are damaged \(index 99 is out of bounds"),
        ("record", r"embeddings\.json is damaged: it lacks fingerprint, weights"),
        ("list", r"embeddings\.json is damaged: it lacks data, fingerprint"),
        ("width", "have several widths: {'images': 19, 'texts': 20}"),
        ("another model", "The sets were embedded by several models: .* Embed all of them with one teacher"),
        ("cut", r"The files of images in .* are damaged \(index 7 is out of bounds"),
        ("emptied", "The files of images in .* are damaged"),
        ("unfinished", "The embeddings of images in .* are not complete"),
        ("only texts", "has no embeddings of images"),
        ("other rows", "training set has a Pairs"),
    ],
)
def test_stored_embeddings_that_do_not_fit_are_refused_with_a_sentence(tmp_path, case, message):
    table, data, options = rows(), ImageTextDataset(rows()), {}
    if case == "missing rows":
        broken = rows().cast_column("image", Image(decode=False)).to_list()
        broken[9]["image"] = {"bytes": b"no image", "path": None}
        table = data = Dataset.from_list(broken, features=rows().features)
        data = ImageTextDataset(table, on_bad_sample="skip")
    folder = store(
        table_source(table.remove_columns("image") if case == "only texts" else table, skips=case == "missing rows"),
        tmp_path / "stored",
        format="parquet" if case == "parquet" else "npy",
    )
    if case == "moved":
        Path(folder).rename(tmp_path / "elsewhere")
    elif case == "other data":
        data = ImageTextDataset(rows(24, 3))
    elif case == "fewer rows":
        data = ImageTextDataset(rows(20))
    elif case == "other order":
        data = ImageTextDataset(rows().shuffle(seed=1))
    elif case == "no old":
        options["replay_dataset"] = ImageTextDataset(rows(30, 50))
    elif case == "nan":
        damaged(folder, lambda values: np.where(np.arange(8)[:, None] == 7, np.nan, values))
    elif case == "zero":
        damaged(folder, lambda values: np.where(np.arange(8)[:, None] == 7, 0, values))
    elif case == "emptied":
        Path(folder, "images-00001-of-00003.npy").write_bytes(b"")
    elif case == "index":
        index = np.load(Path(folder, "images.index.npy"))
        np.save(Path(folder, "images.index.npy"), np.stack((index[0], np.full(24, 99, np.uint64))))
    elif case == "record":
        record = json.loads(Path(folder, "embeddings.json").read_text())
        del record["weights"], record["fingerprint"]
        Path(folder, "embeddings.json").write_text(json.dumps(record))
    elif case == "list":
        Path(folder, "embeddings.json").write_text("[]")
    elif case == "width":
        for path in Path(folder).glob("images-*.npy"):
            np.save(path, np.load(path)[:, 1:])
    elif case == "another model":
        options["replay_dataset"] = ImageTextDataset(rows(30, 50))
        store(table_source(rows(30, 50)), tmp_path / "both/old", models.clip(seed=1, end=END), clip_processor())
        folder = str(Path(folder).rename(tmp_path / "both/new").parent)
    elif case == "cut":
        damaged(folder, lambda values: values[1:])
    elif case == "unfinished":
        Path(folder, "images.index.npy").unlink()
    elif case == "other rows":
        data = models.Pairs(24)
    with pytest.raises(ValueError, match=message):
        taught(tmp_path / "run", data, teacher_embeddings=folder, **options).train()


@pytest.mark.parametrize("holds", ["bytes", "paths"])
@pytest.mark.parametrize("kind", ["as it was", "selected", "swapped", "earlier"])
def test_two_rows_that_changed_places_are_noticed_among_many(tmp_path, kind, holds):
    """The images of 32 rows are compared, and the sizes or the names of all; earlier records have none of these."""
    order, pictures = [*range(80)], [picture(row, (20 + row, 24)) for row in range(80)]
    if holds == "paths":
        for row, image in enumerate(pictures):
            image.save(tmp_path / f"{row}.png")
    images = pictures if holds == "bytes" else [str(tmp_path / f"{row}.png") for row in order]
    features = datasets.Features({"image": Image(), "caption": datasets.Value("string")})
    table = Dataset.from_dict({"image": images, "caption": [f"a {LETTERS[row % 26]}" for row in order]}, features)
    folder = store(table_source(table), tmp_path / "stored")
    if kind == "selected":  # which does not copy the rows
        table = datasets.concatenate_datasets([table, table]).select([*range(79, 160), 0]).select([*range(1, 81)])
        assert table._indices is not None
    elif kind != "as it was":
        order[1], order[4] = 4, 1
        table = table.select(order)
    if kind == "earlier":
        record = json.loads(Path(folder, "embeddings.json").read_text())
        del record["data"]["image sizes" if holds == "bytes" else "image names"]
        Path(folder, "embeddings.json").write_text(json.dumps(record))
    given = {"teacher_embeddings": folder, "teacher_side": "image"}
    if kind != "swapped":
        taught(tmp_path, ImageTextDataset(table), **given)
        return
    with pytest.raises(ValueError, match=f"image {'sizes' if holds == 'bytes' else 'names'} were .* and are"):
        taught(tmp_path, ImageTextDataset(table), **given)


def test_shards_may_be_a_part_of_those_that_were_embedded_but_no_others(tmp_path):
    for shard in range(3):
        members = [m for n in range(8) for m in pair(8 * shard + n, caption=[LETTERS[n]])]
        write_tar(tmp_path / f"shards/{shard}.tar", members)
    shards = str(tmp_path / "shards")
    folder = store(ShardSource(ImageTextStream(f"{shards}/{{0..1}}.tar")), tmp_path / "stored")
    given = {"teacher_embeddings": folder}
    taught(tmp_path, ImageTextStream(f"{shards}/1.tar"), **given)
    with pytest.raises(ValueError, match="stored embedding of the teacher: 1 of the 3 shards"):
        taught(tmp_path, ImageTextStream(f"{shards}/*.tar"), **given)
    with pytest.raises(ValueError, match="of its 1 shard, none is one of the 2"):
        taught(tmp_path, ImageTextStream(f"{shards}/2.tar"), **given)


def test_samples_of_a_shard_that_has_changed_have_no_stored_embedding(tmp_path):
    """Their old ones are in the folder, under the same names."""

    def write(shard: int, count: int) -> None:
        members = [m for n in range(count) for m in pair(n, caption=[LETTERS[n]])]
        write_tar(tmp_path / f"shards/{shard}.tar", members)

    write(0, 8)
    write(1, 8)
    data = ImageTextStream(str(tmp_path / "shards/*.tar"), lanes=2, shuffle_buffer=2)
    folder = store(ShardSource(data), tmp_path / "stored")
    write(1, 24)
    data = ImageTextStream(str(tmp_path / "shards/*.tar"), lanes=2, shuffle_buffer=2)
    given = {"teacher_embeddings": folder, "teacher_missing": "contrastive"}
    run = taught(tmp_path / "run", data, **given)
    items = [item for _, item in zip(range(32), data, strict=False)]
    known = run.context.extensions[0].teacher.inputs(items, {"input_ids": items})["teacher_known_images"]
    assert [item["place"][1].startswith("0/") for item in items] == known.tolist()
    assert known.sum() == 8


def test_shards_of_one_name_are_told_apart_by_their_folders(tmp_path):
    """In any order of the sources, in another folder; the files of shards with names of their own are found as ever."""
    for shard, name in enumerate(("old/a/0", "old/b/0", "old/b/1")):
        write_tar(tmp_path / f"{name}.tar", [m for n in range(8) for m in pair(n, caption=[LETTERS[8 * shard + n]])])
    tags = ShardSource(ImageTextStream([f"{tmp_path}/old/a/*.tar", f"{tmp_path}/old/b/*.tar"])).described()["shards"]
    assert [*tags] == ["a/0.tar", "b/0.tar", "1"]
    folder = store(ShardSource(ImageTextStream(f"{tmp_path}/old/**/*.tar")), tmp_path / "stored")
    (tmp_path / "old").rename(tmp_path / "new")
    changes, every = [], ImageTextStream(f"{tmp_path}/new/**/*.tar", lanes=3, shuffle_buffer=2)
    items = [item for _, item in zip(range(48), every, strict=False)]
    for teaches in {"teacher_embeddings": folder}, reading(items):
        stream = ImageTextStream(
            [f"{tmp_path}/new/b/*.tar", f"{tmp_path}/new/a/*.tar"], lanes=2, shuffle_buffer=4, weights=[2, 1]
        )
        changes.append(moved(trained(taught(tmp_path / "run", stream, **teaches, dataloader_num_workers=1))))
    assert (changes[0] - changes[1]).norm() < 1e-3 * changes[0].norm()
    alone = ImageTextStream(f"{tmp_path}/new/b/1.tar")
    taught(tmp_path / "run", alone, teacher_embeddings=folder)


def test_a_shard_that_has_changed_since_and_one_whose_embeddings_are_damaged(tmp_path):
    """Its size, by which shards are recognised, is the same."""

    def write(letters: str) -> None:
        write_tar(tmp_path / "0.tar", [m for n, letter in enumerate(letters) for m in pair(n, caption=[letter])])

    write(LETTERS[:24])
    folder = store(ShardSource(ImageTextStream(str(tmp_path / "0.tar"))), tmp_path / "stored")
    write(LETTERS[:23] + "z")
    data = ImageTextStream(str(tmp_path / "0.tar"), lanes=2, shuffle_buffer=2)
    with pytest.raises(ValueError, match="has no embedding of 0/000023 or of its caption, although it was made from"):
        taught(tmp_path / "run", data, teacher_embeddings=folder).train()
    write(LETTERS[:24])
    values = np.load(Path(folder, "texts-00000-of-00001.npy"))
    values[5] = np.inf
    np.save(Path(folder, "texts-00000-of-00001.npy"), values)
    with pytest.raises(ValueError, match=r"The embedding of '0/000005.*f' in .* \(texts\) is not finite"):
        taught(tmp_path / "run", data, teacher_embeddings=folder).train()


def test_captions_that_have_changed_since_are_counted_before_the_first_step(tmp_path):
    """Rows 1 and 4 are none of the 32 by which the table is recognised."""
    table = rows(80)
    folder = store(table_source(table), tmp_path / "stored")
    captions: Any = list(table["caption"])
    captions[1], captions[4] = [captions[1][0], "new"], ["other"]
    changed = table.remove_columns("caption").add_column("caption", captions)
    given = {"teacher_embeddings": folder}
    with pytest.raises(ValueError, match="no stored embedding of the teacher: 2 of the 80 rows"):
        taught(tmp_path, ImageTextDataset(changed), **given)
    run = taught(tmp_path, ImageTextDataset(changed), **given, teacher_missing="contrastive")
    known = torch.cat([batch["teacher_known_images"] for batch in run.get_train_dataloader()])
    assert 1 <= (~known).sum() <= 2
    taught(tmp_path, ImageTextDataset(changed), **given, teacher_side="image")


def test_images_of_one_name_are_not_stored(tmp_path):
    """A training would find the embedding of the first one for both."""
    write_tar(tmp_path / "0.tar", [*pair(1, caption=["a"]), *pair(2, caption=["b"]), *pair(1, caption=["c"])])
    source = ShardSource(ImageTextStream(str(tmp_path / "0.tar")))
    with pytest.raises(ValueError, match="Several images have the name '0/000001', by which a training finds"):
        store(source, tmp_path / "stored")


def test_missing_rows_may_be_left_out(tmp_path):
    folder = store(table_source(rows()), tmp_path / "stored")
    old = {"replay_dataset": ImageTextDataset(rows(30, 50)), "teacher_missing": "contrastive"}
    run = trained(taught(tmp_path, ImageTextDataset(rows()), teacher_embeddings=folder, **old))
    logs = [entry["teacher_loss"] for entry in run.state.log_history if "loss" in entry]
    assert all(0 < loss < BETA * 8 for loss in logs)


def test_student_and_teacher_of_other_widths_are_compared(small, tmp_path, capsys):
    """The fixture creates the folder of pairs."""
    for name, model, processor in (
        ("teacher", large_teacher(), large_processor()),
        ("student", models.clip(end=END), clip_processor()),
    ):
        model.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
    words = ["--eval_dataset", tmp_path / "pairs", "--output_dir", tmp_path / "compared", "--use_cpu"]
    both = ["--model", tmp_path / "teacher", tmp_path / "student"]
    infcl("evaluate", *both, *words)
    results = json.loads((tmp_path / "compared/compare_results.json").read_text())["pairs"]
    assert results["images"] == 12
    assert {"first", "second"} <= results["metrics"]["text_retrieval_recall@1"][0].keys()
    assert "12 images" in capsys.readouterr().out
    # ---- Each at a width of its own ----
    infcl("evaluate", *both, *words, "--dims", 20, 4)
    cut = json.loads((tmp_path / "compared/compare_results.json").read_text())
    infcl("evaluate", "--model", tmp_path / "student", *words, "--dims", 4)
    alone = json.loads((tmp_path / "compared/eval_results.json").read_text())
    for name, (metric,) in cut["pairs"]["metrics"].items():
        assert metric["first"] == results["metrics"][name][0]["first"], "20 dimensions are all"
        assert metric["second"] == alone[f"eval_pairs_{name}"]
    metrics = cut["pairs"]["metrics"].items()
    assert any(metric["second"] != results["metrics"][name][0]["second"] for name, (metric,) in metrics)
    assert cut["models"] == [f"{tmp_path / 'teacher'}, 20 dimensions", f"{tmp_path / 'student'}, 4 dimensions"]
    line = mistake(capsys, "evaluate", *both, *words, "--dims", 4, 5, 6)
    assert "--dims takes one number for all models, or one for each of 2, got [4, 5, 6]." in line
    infcl("evaluate", *both, *words, "--dims", 4)
    both_cut = json.loads((tmp_path / "compared/compare_results.json").read_text())
    assert both_cut["models"] == [f"{tmp_path / 'teacher'}, 4 dimensions", cut["models"][1]]


# ---- Together with other options ----


def with_lora() -> Any:
    import peft

    targets = ["q_proj", "v_proj"]
    return peft.get_peft_model(models.clip(end=END), peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0))


def change_of(folder: Path, model: nn.Module, teaches: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """By how much the weights and the map change in four steps."""
    options = {"learning_rate": 1e-2, **options, **teaches}
    trainer = taught(folder, ImageTextDataset(rows()), model=model, **options)
    start = torch.cat([parameters(trainer), *map(Tensor.flatten, start_of_maps_of(trainer))])
    trainer.train()
    return torch.cat([parameters(trainer), *map(Tensor.flatten, start_of_maps_of(trainer))]) - start


def start_of_maps_of(trainer: InfCLTrainer) -> list[Tensor]:
    return [one for term in trainer.context.extensions for one in start_of_maps(term)]


@pytest.mark.parametrize(
    "options",
    [
        {"patch_dropout": 0.5},
        {"texts_at_once": 3, "retain_graphs": "2"},
        {"gradient_accumulation_steps": 2},
        {"optimizer": "muon", "optim": "adamw_torch", "learning_rate": 1e-3},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"gradient_checkpointing": True},
        {"freeze": "image"},
        {"matryoshka_dims": [4, 8]},
        {"model": with_lora},
    ],
    ids=lambda options: " ".join(options) if isinstance(options, dict) else None,
)
def test_every_other_option_trains_alike_with_the_teacher_and_with_its_embeddings(tmp_path, options):
    """A stored teacher knows nothing of the step: dropped patches, dealt texts or compiled towers cannot reach it."""
    options = dict(options)
    build_model = options.pop("model", lambda: models.clip(end=END))
    folder = store(table_source(rows()), tmp_path / "stored")
    found = [
        change_of(tmp_path / name, build_model(), teaches, options)
        for name, teaches in (("a", reading(rows())), ("b", {"teacher_embeddings": folder}))
    ]
    eager = {name: value for name, value in options.items() if not name.startswith("torch_compile")}
    without = change_of(tmp_path / "c", build_model(), {}, eager)
    # AdamW turns the rounding of gradients that are zero, such as those of a key's bias, into steps.
    tolerance = 0.05 if "optimizer" in options else 1e-3
    assert (found[0] - found[1]).norm() <= tolerance * found[0].norm()
    weights = len(without)
    assert (found[0][:weights] - without).norm() > 0.02 * without.norm(), "it does not teach"
    assert found[0][weights:].abs().sum() > 0, "the map does not train"


# ---- Resuming, refusals ----


@pytest.mark.parametrize("options", [{}, {"optimizer": "muon", "optim": "adamw_torch"}], ids=str)
def test_a_resumed_training_goes_on_with_its_map_to_the_bit(tmp_path, options):
    folder = store(table_source(rows()), tmp_path / "stored")
    given = {"teacher_embeddings": folder, "save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    given |= {"optim": "adamw_torch", **options}
    data = ImageTextDataset(rows(), augmentation="crop")
    whole = trained(taught(tmp_path / "whole", data, **given))
    taught(tmp_path / "part", data, **given, callbacks=[StopAt(2)]).train()
    resumed = trained(taught(tmp_path / "part", data, **given), resume=True)
    assert torch.equal(parameters(resumed), parameters(whole))
    maps = [start_of_maps(run.context.extensions[0]) for run in (whole, resumed)]
    assert all(torch.equal(one, other) for one, other in zip(*maps, strict=True))
    assert not torch.equal(maps[0][0], start_of_maps(taught(tmp_path / "new", data, **given).context.extensions[0])[0])
    saved = safetensors.torch.load_file(tmp_path / "part" / "checkpoint-5" / "model.safetensors")
    assert saved.keys() == models.clip(end=END).state_dict().keys()
    other = store(table_source(rows()), tmp_path / "other", models.clip(seed=5, end=END), clip_processor())
    with pytest.raises(ValueError, match=r"teacher: fingerprint was '\w+' and is '\w+'"):
        taught(tmp_path / "part", data, **{**given, "teacher_embeddings": other, "max_steps": 6}).train(True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher_weight": 2.0}, "teacher_weight=2 has no effect without teacher or teacher_embeddings"),
        ({"teacher": "t", "teacher_embeddings": "e"}, "exclude each other: these are of a teacher already"),
        (
            {"data": models.Stream(40), "teacher": "clip"},
            "the samples of the shards of an ImageTextStream, but .* a Stream",
        ),
        ({"teacher_side": "all"}, "teacher_side must be one of 'both', 'image', 'text', got 'all'"),
        ({"contrastive_weight": 0.0}, "leaves nothing to learn without a teacher"),
        ({"contrastive_weight": 2.0}, "contrastive_weight must be a number from 0 to 1, got 2.0"),
        (
            {"teacher_missing": "contrastive"},
            "teacher_missing=contrastive has no effect without teacher or teacher_e",
        ),
        (
            {"teacher_missing": "contrastive", "teacher_embeddings": "x", "contrastive_weight": 0.0},
            "exclude each other: it switches off the loss to which such pairs would be left",
        ),
        (
            {"teacher": "x", "matryoshka_dims": [4], "contrastive_weight": 0.0},
            "exclude each other: it switches off the loss that is computed at each of these",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, message):
    options = {"teacher_weight": 1.0, "data": ImageTextDataset(rows()), **options}
    with pytest.raises(ValueError, match=message):
        taught(tmp_path, **options)


def test_a_model_that_runs_beside_the_student_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"Name it in the arguments, InfCLTrainingArguments\(teacher=\.\.\.\), which embeds"
    ):
        InfCLTrainer(models.clip(), arguments(tmp_path), train_dataset=models.Pairs(8), teacher=models.clip())


def test_a_passed_optimizer_does_not_know_the_map(tmp_path):
    model = models.clip()
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1), None
    taught = taught_by(Running(models.siglip(), SIDES), model, BETA)
    trainer = trainer_for(tmp_path, model, **taught, optimizers=optimizers)
    with pytest.raises(ValueError, match="linear map to a teacher of another width, which it does not update"):
        trainer.train()
