"""Published files state what was measured: the facts of a run, its card, its curves and the Hub's result files."""

import ast
import dataclasses
import functools
import math
import re
from types import SimpleNamespace
from typing import Any

import datasets
import jinja2
import numpy as np
import pytest
import torch
import yaml
from helpers import models, processors
from helpers.guides import ROOT, blocks
from helpers.pictures import captioned
from helpers.trainers import StopAt, arguments, trained, trainer_for
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from PIL import Image
from transformers import TrainerCallback, TrainerState

from hf_infcl import ContrastiveCollator, ImageTextDataset, InfCLTrainer, ZeroShotDataset
from hf_infcl.card import CardCallback, Evaluation, Source, pictures, training_facts
from hf_infcl.card.cards import model_card, write_eval_results, write_publication
from hf_infcl.card.facts import TrainingFacts, source_name, training_settings, with_texts
from hf_infcl.card.pictures import PICTURES_FILE, PicturesCallback, plot_curves
from hf_infcl.card.telling import earlier_best, lines_of_changes, outcome
from hf_infcl.cli import main
from hf_infcl.cli.models import other_loss
from hf_infcl.files.text import counted
from hf_infcl.quality.averages import Averaged
from hf_infcl.trainer import loop_events as progress

ZERO_SHOT = {"acc1": 0.51234, "acc5": math.nan, "mean_per_class_recall": 0.5, "runtime": 1.5, "samples_per_second": 7.0}
PAIRS = {"loss": 1.25, "image_retrieval_recall@1": 0.25, "text_retrieval_recall@1": 0.75, "steps_per_second": 3.0}
LABELLED = Evaluation(
    "someone/labelled", True, "validation", 300, "zero_shot", ZERO_SHOT, ["a photo of a {}."], ["cat", "dog"]
)
RETRIEVAL = Evaluation("someone/pairs", True, "test", 1000, "pairs", PAIRS)


@pytest.fixture(autouse=True)
def strict_template(monkeypatch):
    """A name that the template of the card has wrong is an error here; in a training it would be an empty place."""
    monkeypatch.setattr(jinja2, "Template", functools.partial(jinja2.Template, undefined=jinja2.StrictUndefined))


def facts(**changes: Any) -> TrainingFacts:
    values: dict[str, Any] = {
        "name": "my-clip",
        "location": "me/my-clip",
        "model_class": "CLIPModel",
        "start": "someone/clip",
        "start_on_hub": True,
        "sources": [Source("someone/pairs", True, license="cc-by-4.0")],
        "pairs": 1234,
        "objective": "softmax",
        "strategy": "ring",
        "per_device_batch_size": 8,
        "accumulation_steps": 4,
        "processes": 1,
        "steps": 60,
        "seconds": 4000.4,
        "device": "CPU",
        "versions": {"hf_infcl": "0.1.0", "torch": "2.13.0"},
        "settings": {"learning rate": "0.001, cosine, 6 steps of warm-up"},
    }
    return TrainingFacts(**{**values, **changes})


def read(made: TrainingFacts, folder: Any, **options: Any) -> ModelCard:
    model_card(made, **options).save(folder / "README.md")
    return ModelCard.load(folder / "README.md")


def test_what_the_card_says_is_what_the_hub_reads(tmp_path):
    card = read(facts(evaluations=[LABELLED, RETRIEVAL], frozen="image"), tmp_path, curves="curves.png")
    assert card.data.model_name == "my-clip"
    assert card.data.library_name == "transformers"
    assert (card.data.base_model, card.data.base_model_relation) == ("someone/clip", "finetune")
    assert card.data.datasets == ["someone/pairs"]
    assert {"loss:softmax", "dataset_size:1234"} <= set(card.data.tags)
    results = {
        (r.task_type, r.dataset_name, r.dataset_split, r.metric_name): r.metric_value for r in card.data.eval_results
    }
    assert results == {
        ("zero-shot-image-classification", "someone/labelled", "validation", "top-1 accuracy"): 0.5123,
        ("zero-shot-image-classification", "someone/labelled", "validation", "mean per class recall"): 0.5,
        ("image-text-retrieval", "someone/pairs", "test", "contrastive loss of the whole set as one batch"): 1.25,
        ("image-text-retrieval", "someone/pairs", "test", "image retrieval recall@1"): 0.25,
        ("image-text-retrieval", "someone/pairs", "test", "text retrieval recall@1"): 0.75,
    }
    for fact in (
        "**32 pairs** = 8 per device × 4 accumulation steps × 1 process |",
        "60 optimizer steps, 1,920 pairs seen, 1.6 epochs |",
        "| negatives | all other pairs of the batch, including those with equal captions |",
        "0.001, cosine",
        "licence cc-by-4.0",
        "| frozen | image tower |",
        "| time | 1 h 6 min 40 s with 1 process on CPU |",
        "| `someone/labelled`, split validation | 300 | top-1 accuracy | 0.5123 |",
        "`a photo of a {}.`",
        '["cat", "dog"]',
        "](curves.png)",
        "2410.17243",
        "2304.08480",
    ):
        assert fact in card.text, fact
    for absent in ("top-5", "measured during", "skipped rows", "runtime", "per_second", "GiB", "| strategy |"):
        assert absent not in card.text, absent


def test_what_weakens_a_result_is_told(tmp_path):
    made = facts(
        evaluations=[dataclasses.replace(RETRIEVAL, step=60)],
        pair_id_column="url",
        skipped=3,
        processes=2,
        peak_memory=3 << 30,
        measured_during_training=True,
        sources=[Source("a/b", True, weight=0.7), Source("folder", False, weight=0.3)],
        pairs=None,
    )
    text = read(made, tmp_path).text
    assert "all other pairs of the batch except those with equal `url`" in text
    assert "| skipped rows | 3 replaced by another row or left out |" in text
    assert "measured during training; the figures are those of the last step" in text
    assert "`a/b` (split train, 70.0% of the draws, no licence stated) and `folder`" in text
    assert "3.0 GiB on one GPU" in text
    assert "× 2 processes |" in text
    assert "3,840 pairs seen |" in text
    assert "`ring` shares the batch" in text
    assert "epochs" not in text, "the length of a stream is not known"
    assert "not evaluated" in read(facts(), tmp_path).text


def test_positives_and_negatives_of_several_captions_are_told(tmp_path):
    several = {"equal_ids": "positive", "captions_per_image": 5, "negative_caption_column": "swapped"}
    text = read(facts(**several), tmp_path).text
    assert "| positives | up to 5 captions of the image, drawn anew each epoch |" in text
    assert "| negatives | all other captions of the batch; for all images also one of `swapped` of each image" in text
    text = read(facts(equal_ids="positive", pair_id_column="label"), tmp_path).text
    assert "| positives | the caption of the image, and those with equal `label` |" in text


def test_the_captions_of_a_training_in_python_are_told(tmp_path):
    rows = datasets.Dataset.from_dict({"image": ["a.png"] * 8, "caption": [["a", "b"]] * 8, "wrong": ["c"] * 8})
    trainer: Any = trainer_for(tmp_path, equal_ids="positive")
    trainer.state.log_history = [{"step": 1, "texts_per_image": 2.0}]
    assert "| positives | all captions of the image |" in read(training_facts(trainer, **DESCRIBED), tmp_path).text
    trainer.train_dataset = ImageTextDataset(rows, captions_per_image=2, negative_caption_column="wrong")
    text = read(training_facts(trainer, **DESCRIBED), tmp_path).text
    assert "| positives | up to 2 captions of the image, drawn anew each epoch |" in text
    assert "for all images also one of `wrong`" in text


def test_an_evaluation_says_if_its_loss_is_not_that_of_the_training(tmp_path):
    trainer: Any = trainer_for(tmp_path / "run")
    assert not [*other_loss(trainer, "someone/clip", SimpleNamespace(pair_id_column="id"))]
    facts(equal_ids="positive", pair_id_column="id").save(tmp_path)
    for ids, had in ((None, "--equal_ids positive and --pair_id_column id"), ("id", "--equal_ids positive")):
        told = f"The loss of pairs is not that of the training, which had {had}. Recalls are the same."
        assert [*other_loss(trainer, f"{tmp_path}/checkpoint-3", SimpleNamespace(pair_id_column=ids))] == [told]
    assert not [*other_loss(trainer, str(tmp_path), None)], "no pairs are measured"
    facts().save(tmp_path)
    assert not [*other_loss(trainer, str(tmp_path), SimpleNamespace(pair_id_column=None))]
    (told,) = other_loss(trainer, str(tmp_path), SimpleNamespace(pair_id_column="id"))
    assert "which had no --pair_id_column." in told


def test_an_evaluation_under_another_rule_of_transparency_says_so(tmp_path):
    rows = datasets.Dataset.from_dict({"image": ["a.png"] * 8, "caption": ["a"] * 8})
    trainer: Any = trainer_for(tmp_path / "run", data=ImageTextDataset(rows))
    rule = training_settings(trainer)["transparency of images"]
    assert rule.startswith("laid on white")
    line = f"In the training, transparency of images was dropped. Here it is {rule}"
    for before, told in ((rule, []), ("dropped", [line])):
        facts(settings={"transparency of images": before}).save(tmp_path)
        lines = [*other_loss(trainer, str(tmp_path), None)]
        assert [line.partition(": transparent")[0] for line in lines] == told


def test_the_augmentation_is_that_of_the_training_set(tmp_path):
    trainer: Any = trainer_for(tmp_path)
    assert "augmentation" not in training_settings(trainer), "it is not known of other datasets"
    trainer.train_dataset = SimpleNamespace(options={"augmentation": "crop"})
    assert training_settings(trainer)["augmentation"] == "crop"


def test_the_guide_s_callback_writes_the_card_of_a_training_from_python(tmp_path):
    (block,) = blocks((ROOT / "model_cards/README.md").read_text(encoding="utf-8"))
    trainer = trainer_for(tmp_path / "mine", max_steps=1)
    given = {"trainer": trainer, "checkpoint": "someone/clip", "train_dataset": trainer.train_dataset, "pairs": "12345"}
    exec(block, given)
    trainer.train()
    text = (tmp_path / "mine" / "README.md").read_text()
    assert "**8 pairs** = 4 per device × 2 accumulation steps × 1 process |" in text
    assert "`someone/pairs` (split train, licence cc-by-4.0)" in text
    assert "| negatives | all other pairs of the batch except those with equal `caption` |" in text


@pytest.mark.parametrize(
    "name", ['a "quoted" {}', "pipe | {}", "`tick` {}", "back\\slash {}", "two\nlines {}", "é 猫 {}"]
)
def test_any_name_leaves_the_snippet_python_and_the_table_whole(tmp_path, name):
    evaluation = dataclasses.replace(
        LABELLED, dataset="da|ta`set", on_hub=False, templates=[name], class_names=[name, "{{ x }}", '"']
    )
    made = facts(evaluations=[evaluation], sources=[Source("x|y", False)], pair_id_column="a|b", location='p"q')
    text = read(made, tmp_path).text
    (snippet,) = blocks(text)
    calls = [node for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Call)]
    asked = next(call for call in calls if getattr(call.func, "id", "") == "classifier")
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in asked.keywords}
    assert keywords == {"candidate_labels": [name, "{{ x }}", '"'], "hypothesis_template": name}
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        widths = {len(re.split(r"(?<!\\)\|", row)) for row in block.splitlines()}
        assert len(widths) == 1, block


def after(score: float, low: float, **metrics: float) -> Evaluation:
    """A set whose score was 0.5 before the training, and the lower bounds of its new score and of the change."""
    new = {"acc1": score, "acc1_low": low, "acc1_high": 1.0, **metrics}
    return dataclasses.replace(LABELLED, metrics=new, before={"acc1": 0.5, "acc1_low": 0.4, "loss": 6.0})


def alone(low: float) -> Evaluation:
    """The same, where nothing was measured before the training."""
    return dataclasses.replace(after(0.5, low), before={})


def at_chance(**metrics: float) -> Evaluation:
    """A set of two classes that a model guesses, as before or after it chose the same class for nearly all images."""
    before = {"acc1": 0.4, "acc1_low": 0.35, "acc5": 0.5, "acc5_low": 0.45}
    return dataclasses.replace(after(0.49, 0.3, **metrics), before=before)


FEW, NOISE = "the training made 60 steps instead of a few hundred", "rose beyond its 95% interval"


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, [FEW]),
        ({"steps": 1}, ["the training made 1 step instead"]),
        ({"steps": 100}, []),
        ({"steps": 100, "rates": {"adamw": 9.8e-7}}, ["the learning rate of AdamW is 9.8e-07, below 1e-06"]),
        ({"steps": 100, "rates": {"adamw": 1e-6, "muon": 4e-6}}, []),
        ({"steps": 100, "rates": {"adamw": 1e-6, "muon": 3e-6}}, ["the learning rate of Muon is 3e-06, below 4e-06"]),
        ({"steps": 100, "rates": {"adamw": 0.1}}, ["AdamW is 0.1, at least 0.1, so that each step replaces"]),
        ({"steps": 100, "rates": {"adamw": 0.099}}, []),
        ({"evaluations": [after(0.6, 0.51)]}, []),
        ({"evaluations": [after(0.6, 0.4, score_change_low=0.01)]}, []),
        ({"evaluations": [after(0.6, 0.4, score_change_low=-0.01)]}, [FEW, NOISE]),
        ({"evaluations": [after(0.3, 0.2, score_change_low=-0.3)], "steps": 100}, [NOISE]),
        ({"evaluations": [at_chance(acc5=0.9, acc5_low=0.8)], "steps": 100}, [NOISE]),  # its top-5 accuracy has risen
        ({"evaluations": [at_chance(acc1_low=0.47, score_change_low=0.1)], "steps": 100}, [NOISE]),  # two classes
        ({"evaluations": [after(0.6, 0.4, loss=4.0)], "rates": {"adamw": 1.0}}, []),
        ({"evaluations": [after(0.6, 0.4, loss=5.6)], "steps": 100}, [NOISE]),  # a model that tells nothing apart
        ({"evaluations": [dataclasses.replace(after(0.6, 0.51), guard=True)]}, [FEW]),
        ({"evaluations": [RETRIEVAL], "steps": 100}, []),  # not measured before
        ({"evaluations": [alone(0.51)]}, []),
        ({"evaluations": [alone(0.0)], "rates": {"adamw": 1.0}}, [FEW, "AdamW", "no score .* clearly above chance"]),
        ({"evaluations": [after(0.5, 0.4), after(0.6, 0.51)]}, []),
    ],
)
def test_a_training_that_may_have_taught_nothing_says_so_first(tmp_path, changes, reasons):
    made = facts(**changes)
    said = outcome(made)
    assert said.startswith("It is doubtful that this model has learned anything: ") == bool(reasons)
    assert all(re.search(reason, said) for reason in reasons)
    assert said.count("; ") == max(0, len(reasons) - 1)
    made.save(tmp_path)
    text = read(TrainingFacts.load(tmp_path), tmp_path).text
    first = f"{said}\n\n" if said else ""
    assert text.startswith(
        f"\n# my-clip\n\n{first}This is a `CLIPModel` trained with `hf_infcl` on the captioned images"
    )


@pytest.mark.parametrize(
    ("best", "guard", "told"), [(0.81, False, True), (0.79, False, False), (0.81, True, False)], ids=str
)
def test_a_training_that_was_better_long_before_its_end_says_so(best, guard, told):
    last = dataclasses.replace(after(0.7, 0.6, acc1_high=0.8), guard=guard)
    scores = {0: 0.99, 10: 0.5, 20: best, 30: best, 60: 0.7}  # that before the training is not the training's
    history = [{"step": step, f"eval_{last.key}_acc1": score} for step, score in scores.items()]
    said = earlier_best(history, facts(evaluations=[last]))
    assert ("was 81.00% after step 20, and 70.00% at the end" in said) == told
    assert ("--load_best_model_at_end" in said) == told


@pytest.mark.parametrize("tolerance", [0.01, None])
def test_an_average_that_is_the_start_was_not_trained(tmp_path, tolerance):
    made = facts(average=Averaged(0.0, tolerance), evaluations=[after(0.9, 0.8)])
    said = outcome(made)
    assert said.startswith("This model was not trained: its weights are those before the training, ")
    assert ("guard_tolerance above" in said) == (tolerance is not None)
    assert ("gains nothing" in said) == (tolerance is not None)
    text = read(made, tmp_path).text
    assert text.startswith(f"\n# my-clip\n\n{said}\n\nIt is a `CLIPModel`. The training described here, with")
    assert "trained with" not in text.partition("## Training")[0]
    assert not outcome(facts(average=Averaged(0.1, tolerance), evaluations=[after(0.9, 0.8)]))


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"learning_rate": 5e-4}, {"adamw": 5e-4}),
        ({"learning_rate": 5e-4, "optimizer": "muon"}, {"adamw": 5e-4, "muon": 2e-3}),
        ({"learning_rate": 5e-4, "logit_scale_learning_rate": 1.0, "image_learning_rate": 1e-3}, {"adamw": 1e-3}),
        ({"learning_rate": 0.5, "optim": "sgd"}, {}),
    ],
)
def test_rates_are_those_of_the_groups(tmp_path, options, rates):
    trainer = trained(trainer_for(tmp_path, max_steps=1, lr_scheduler_type="cosine", **options))
    assert training_facts(trainer, **DESCRIBED).rates == pytest.approx(rates)


HOSTILE = [
    "<script>alert(1)</script>",
    "![x](https://example.org/x.png)",
    "a\n\n# Heading\n---\n",
    "a\r\n```\n<img src=x>\n```",
    "``` ` ``",
    r"one \| two \\| three",
    "https://example.org www.example.org",
    "\x1b[31m \u202e \x85 &lt; @someone",
    "goldfish, Carassius auratus",
]


def structure(card: ModelCard) -> list[Any]:
    """What a reader of Markdown makes of a card: headings, links, HTML, and the width of each row of its tables."""
    text = re.sub(r"```python\n.*?```", "", card.text, flags=re.DOTALL)
    rows = [len(pipes(line)) for line in text.splitlines() if line.startswith("|")]
    text = re.sub(r"(?<![`\\])(`+)(?!`)(?:.*?[^`])\1(?!`)", "", text)  # code is shown as it is
    text = re.sub(r"\\[^\w\s]", "", text)
    return [rows, re.findall(r"^(?:#+|---|```.*)|[<>&@]|!?\[.*?\]\(|https?://[^ )]*|www\.", text, flags=re.MULTILINE)]


def pipes(line: str) -> list[str]:
    """The pipes that end a cell: those after an even number of backslashes."""
    return re.findall(r"(?<!\\)(?:\\\\)*\|", line)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_others_is_only_shown(tmp_path, text):
    def card_of(name: str) -> ModelCard:
        evaluation = dataclasses.replace(
            LABELLED,
            **{"dataset": name.replace("://", ""), "on_hub": False, "split": name, "class_names": [name, "cat"]},
            **{"templates": [f"{name} {{}}", f"{{}} {name}"], "revision": f"sha256:{name}", "before": {"acc1": 0.1}},
            metrics={"acc1": 0.2, name: 0.3},
        )
        source = Source(name.replace("://", ""), False, name, name)
        made = facts(
            **{"name": name, "start": name, "start_on_hub": False, "sources": [source], "evaluations": [evaluation]},
            **{"pair_id_column": name, "negative_caption_column": name, "replay_sources": [source], "replayed": 4},
            **{"caption_limit": 7, "cut_captions": {f"evaluation set of eval_{name}_*": 0.5}},
        )
        return read(made, tmp_path)

    card, harmless = card_of(text), card_of("harmless")
    assert structure(card) == structure(harmless)


def test_names_with_dollars_are_drawn(tmp_path):
    history = [{"step": 1, "loss": 1.0, r"eval_a$\x$b_acc1": 0.5}]
    plot_curves(history, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_an_adapter_is_loaded_onto_its_base(tmp_path):
    card = read(facts(adapter=True), tmp_path)
    assert card.data.library_name == "peft"
    assert card.data.base_model_relation == "adapter"
    assert 'PeftModel.from_pretrained(CLIPModel.from_pretrained("someone/clip"), "me/my-clip")' in card.text
    ast.parse(blocks(card.text)[0])
    local = read(facts(adapter=True, start="clip", start_on_hub=False), tmp_path)
    assert 'CLIPModel.from_pretrained("path/to/clip")' in local.text, "its path is not told, its name is no Hub id"


def test_the_code_of_a_card_pads_texts_as_the_training_did(tmp_path, monkeypatch):
    """The pipeline of transformers pads those for SigLIP to 64 tokens, and may end with an error."""
    model, processor = models.siglip(), processors.siglip_processor()
    collator = ContrastiveCollator.for_model(processor, model.config)
    assert collator.max_length != 64
    labelled = dataclasses.replace(LABELLED, templates=["a {}"], class_names=["b", "c"])
    of_siglip = {"model_class": "SiglipModel", "location": str(tmp_path), "evaluations": [labelled]}
    for other in ({"caption_limit": 64}, {"caption_limit": None}, {"caption_limit": 9, "model_class": "CLIPModel"}):
        assert "pipeline(" in read(facts(**{**of_siglip, **other}), tmp_path).text
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    image = Image.new("RGB", (40, 30), (200, 40, 90))
    image.save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(read(facts(**of_siglip, caption_limit=collator.max_length), tmp_path).text)
    exec(code, found := {})
    batch = collator([{"image": np.asarray(image), "caption": [text]} for text in ("a b", "a c")])
    with torch.no_grad():
        expected = model(**batch).logits_per_image[:1].sigmoid()
    torch.testing.assert_close(found["scores"], expected)
    assert expected[0, 0] != expected[0, 1]


def test_local_paths_are_neither_told_nor_linked(tmp_path):
    (tmp_path / "pairs").mkdir()
    assert source_name(str(tmp_path / "pairs")) == ("pairs", False)
    assert source_name(str(tmp_path / "gone")) == ("gone", False), "an absolute path is no Hub id"
    assert source_name("someone/pairs") == ("someone/pairs", True)
    local = dataclasses.replace(RETRIEVAL, dataset="pairs", on_hub=False)
    made = facts(start="start", start_on_hub=False, sources=[Source("pairs", False)], evaluations=[local])
    card = read(made, tmp_path)
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert write_publication(facts(evaluations=[local]), tmp_path, TrainerState()) is None
    assert not (tmp_path / ".eval_results").exists()


def test_the_card_is_written_again_from_the_folder_alone(tmp_path, capsys):
    made = facts(evaluations=[RETRIEVAL], settings={"seed": "7"})
    made.save(tmp_path)
    assert model_card(TrainingFacts.load(tmp_path)).content == model_card(made).content
    with pytest.raises(ValueError, match=rf"has no training_record\.json.*{tmp_path}, the folder above, has one"):
        TrainingFacts.load(tmp_path / "checkpoint-3")
    without = (tmp_path / "training_record.json").read_text().replace('"sources"', '"others"')
    for text in ("{", "{}", '{"sources": [{"x": 1}], "evaluations": []}', "[]", without):
        (tmp_path / "training_record.json").write_text(text)
        with pytest.raises(ValueError, match="holds no facts of a training"):
            TrainingFacts.load(tmp_path)
    made.save(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(SystemExit):
        main("card", [str(tmp_path)])
    assert "trainer_state.json is damaged: Expecting property name" in capsys.readouterr().err


def test_results_on_data_of_the_hub_are_in_its_format(tmp_path):
    write_publication(facts(evaluations=[LABELLED, RETRIEVAL]), tmp_path, TrainerState())
    entries = yaml.safe_load((tmp_path / ".eval_results" / "someone_pairs.yaml").read_text())
    assert {entry["dataset"]["id"] for entry in entries} == {"someone/pairs"}
    assert {entry["dataset"]["task_id"]: entry["value"] for entry in entries} == {
        "loss": 1.25,
        "image_retrieval_recall@1": 0.25,
        "text_retrieval_recall@1": 0.75,
    }


def test_what_a_push_may_read_meanwhile_is_replaced_whole(tmp_path, monkeypatch):
    written = facts(evaluations=[RETRIEVAL])
    state = TrainerState(log_history=[{"loss": 1.0, "step": 1}])

    def publish() -> None:
        written.save(tmp_path)
        write_publication(written, tmp_path, state)

    publish()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"README.md", "curves.png", "training_record.json", "someone_pairs.yaml"} <= {path.name for path in before}
    replaced: list[Any] = []
    monkeypatch.setattr("os.replace", lambda partial, path: replaced.append(partial.relative_to(tmp_path)))
    changed = dataclasses.replace(RETRIEVAL, metrics={"text_retrieval_recall@1": 0.125})
    written = facts(start="another", evaluations=[changed])
    state = TrainerState(log_history=[{"loss": 2.0, "step": 1}])
    publish()
    assert {path: path.read_bytes() for path in before} == before
    assert len(replaced) == 4, "the record, the curves, the results and the card"
    assert all(str(path).startswith("_") for path in replaced), "which a push of the folder leaves out"
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before.keys(), "nothing is left of an error"


DESCRIBED: dict[str, Any] = {
    "model_class": "CLIPModel",
    "start": "someone/clip",
    "sources": [Source("pairs", False)],
    "pair_id_column": None,
}


def test_facts_are_the_last_of_the_logs(tmp_path):
    trainer = trainer_for(tmp_path, eval_strategy="steps", eval_steps=5, eval_dataset=models.Pairs(8), fp16=True)
    history = [
        {"step": 1, "loss": 2.0, "train_seconds": 1.0, "skipped_samples": 2},
        {"step": 1, "eval_pairs_loss": 9.0},
        {"step": 2, "loss": 1.0, "train_seconds": 3.5, "skipped_samples": 3, "peak_memory": 7},
        {"step": 2, "eval_pairs_loss": 8.0, "eval_pairs_runtime": 1.0},
    ]
    kept: Any = {"train_seconds": 3.5}
    trainer.state = TrainerState(global_step=10, max_steps=10, log_history=history, stateful_callbacks=kept)
    made = training_facts(
        trainer,
        **{**DESCRIBED, "start": str(tmp_path)},
        evaluations=[dataclasses.replace(RETRIEVAL, metrics={}), dataclasses.replace(LABELLED, metrics={})],
    )
    assert (made.seconds, made.skipped, made.peak_memory) == (3.5, 3, 7)
    assert [e.metrics for e in made.evaluations] == [{"loss": 8.0, "runtime": 1.0}], "sets not measured are left out"
    assert made.measured_during_training
    assert "the figures are those of step 2, but the weights are those of step 10." in read(made, tmp_path).text
    assert not made.start_on_hub
    assert "Measured in fp32; another precision" in read(made, tmp_path).text
    assert made.settings["precision"] == "fp32", "accelerate computes in fp32 on CPUs where fp16 is asked for"


def test_facts_have_what_the_trainer_knows_of_texts(tmp_path):
    rows = datasets.Dataset.from_dict({"image": [Image.new("RGB", (8, 8))], "label": [0]})
    labelled = ZeroShotDataset(rows, class_names=["cup", "vase"], templates=["a {c}", "{c}"])
    trainer = trainer_for(tmp_path, data=ImageTextDataset(captioned(["a cup"] * 8)), eval_dataset={"classes": labelled})
    trainer.state.log_history = [{"step": 1, "eval_classes_acc1": 0.5}]
    made = training_facts(trainer, **DESCRIBED, evaluations=[Evaluation("my", False, "test", 1, "classes")])
    assert [(e.templates, e.class_names) for e in made.evaluations] == [(("a {}", "{}"), ["cup", "vase"])]
    assert made.caption_limit == trainer.data_collator.max_length


def test_columns_tell_apart_what_is_measured_on_the_same_images(tmp_path):
    rows = captioned(["a"], de=["b"])
    sets = {name: ImageTextDataset(rows, caption_column=name, all_captions=True) for name in ("caption", "de")}
    apart = [RETRIEVAL, dataclasses.replace(RETRIEVAL, dataset="someone/else", key="de")]
    assert with_texts(apart, {"pairs": sets["caption"], "de": sets["de"]}) == apart
    both = with_texts([dataclasses.replace(RETRIEVAL, key=key, before=PAIRS) for key in sets], sets)
    card = read(made := facts(evaluations=[*both, LABELLED]), tmp_path)
    for column in sets:
        assert f"| `someone/pairs`, split test, column {column} (captions) | evaluation |" in card.text
        assert f"| `someone/pairs`, split test, column {column} | 1,000 | image retrieval recall@1 |" in card.text
        told = f"someone/pairs, split test, column {column} (captions) "
        assert [line.startswith(told) for line in lines_of_changes(made)].count(True) == 1
    assert {result.dataset_config for result in card.data.eval_results} == {"caption", "de", None}
    write_eval_results(made, tmp_path)
    entries = yaml.safe_load((tmp_path / ".eval_results" / "someone_pairs.yaml").read_text())
    assert {entry["notes"] for entry in entries} == {"split test, column caption", "split test, column de"}


def test_every_set_is_told_as_it_was_before_and_after(tmp_path):
    trainer = trainer_for(tmp_path)
    history = [
        {"step": 0, "eval_guard1_old_loss": 1.0, "eval_pairs_loss": 9.0},
        {"step": 1, "eval_guard1_old_loss": 1.5},
        {"step": 2, "eval_guard1_old_loss": 2.0, "eval_pairs_loss": 8.0, "eval_zero_shot_acc1": 0.5},
        {"step": 2, "eval_again_loss": 2.0, "eval_again_runtime": 3.0},
    ]
    trainer.state = TrainerState(global_step=2, max_steps=2, log_history=history)
    made = training_facts(
        trainer,
        **{**DESCRIBED, "start": str(tmp_path)},
        evaluations=[
            Evaluation("old", False, "test", 10, "again"),
            Evaluation("old", False, "test", 10, "guard1_old", guard=True),
            Evaluation("new", False, "test", 10, "pairs"),
            Evaluation("labelled", False, "test", 10, "zero_shot", {}, ["a {}."], ["cat"]),
        ],
    )
    keys = [e.key for e in made.evaluations]
    assert keys == ["guard1_old", "pairs", "zero_shot"], "the guard set is an evaluation set, too"
    made.save(tmp_path)
    assert [e.before for e in TrainingFacts.load(tmp_path).evaluations] == [{"loss": 1.0}, {"loss": 9.0}, {}]
    text = read(made, tmp_path).text
    assert "| 2.0000 | 1.0000 |" in text
    assert "`old`, split test is a guard (a retention set)" in text
    assert "| 8.0000 | 9.0000 |" in text
    trainer.state.log_history = history[:1]
    begun = training_facts(trainer, **DESCRIBED, evaluations=made.evaluations)
    assert not begun.evaluations, "the figures before the training are no results of it"


BEST: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}


def test_the_best_weights_are_told_once_they_are_loaded_and_with_their_own_figures(tmp_path):
    trainer = trainer_for(tmp_path, eval_dataset=models.Pairs(8), **BEST)
    history = [{"step": 1, "eval_pairs_loss": 2.98}, {"step": 2, "eval_pairs_loss": 11.93}]
    best = {"best_model_checkpoint": "checkpoint-1", "best_global_step": 1}
    pairs = Evaluation("pairs", False, "test", 10, "pairs")

    def told(*more: dict[str, float]) -> tuple[bool, float, str]:
        trainer.state = TrainerState(global_step=2, max_steps=9, log_history=[*history, *more], **best)
        made = training_facts(trainer, **DESCRIBED, evaluations=[pairs])
        return made.best, made.evaluations[0].metrics["loss"], read(made, tmp_path).text

    is_best, loss, text = told()
    assert (is_best, loss) == (False, 11.93), "in the training, or after an interruption"
    assert "the figures are those of the last step, not of the best." in text
    end = {"step": 2, "train_runtime": 1.0, "train_loss": 0.5}
    is_best, loss, text = told(end)
    assert (is_best, loss) == (True, 2.98)
    assert "the figures are those of the best of these evaluations, at step 1, and so are the weights." in text
    assert told(end, {"step": 2, "eval_pairs_loss": 2.97})[:2] == (True, 2.97), "they were measured again"


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"optim": "adamw_torch", "adam_beta2": 0.98}, {"optimizer": "adamw_torch, β = (0.9, 0.98), weight decay 0"}),
        ({"optim": "sgd", "weight_decay": 0.1}, {"optimizer": "sgd, weight decay 0.1"}),
        ({"optim": "sgd", "optim_args": "momentum=0.9"}, {"optimizer": "sgd, momentum 0.9, weight decay 0"}),
        ({"optim": "adafactor"}, {"optimizer": "adafactor, weight decay 0"}),
        ({"lr_scheduler_type": "constant", "learning_rate": 1e-3}, {"learning rate": "0.001, constant"}),
        (
            {"lr_scheduler_type": "cosine", "warmup_steps": 5, "logit_scale_learning_rate": 0.25},
            {"learning rate": "5e-05, cosine, 5 steps of warm-up", "learning rate of logit_scale": "0.25"},
        ),
        ({"optimizers": True}, {"optimizer": "SGD, momentum 0.5, weight decay 0", "learning rate": "0.5, LambdaLR"}),
        (
            {"optimizer": "muon"},
            {
                "optimizer": "Muon and adamw_torch_fused, β = (0.9, 0.999), momentum 0.95, weight decay 0",
                "updated by Muon": "matrices of layers (14, learning rate 0.0002)",
            },
        ),
        ({"weights": torch.bfloat16}, {"precision": "bf16"}),
        ({"bf16": True}, {"precision": "bf16 autocast"}),
        (
            {"image_learning_rate": 1e-3},
            {"learning rate of the image tower": "0.001"},
        ),
    ],
)
def test_optimizer_schedule_and_precision_are_those_of_the_training(tmp_path, options, rows):
    options = dict(options)
    model = models.clip().to(options.pop("weights", torch.float32))
    if "optimizers" in options:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        options["optimizers"] = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = trainer_for(tmp_path, model, models.Pairs(16), max_steps=1, **options)
    training_facts(trainer, **DESCRIBED)  # also before it has an optimizer
    trainer.train()
    settings = training_facts(trainer, **DESCRIBED).settings
    assert {name: settings[name] for name in rows} == rows
    assert ("learning rate of logit_scale" in settings) == ("logit_scale_learning_rate" in options)


class Slow(TrainerCallback):
    """Makes each step take ten seconds of a clock."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock[0] += 10


def test_the_time_is_that_of_all_steps_of_a_run(tmp_path, monkeypatch):
    """Also of those after the last log, and before and after an interruption."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    options = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "max_steps": 7}
    first = trained(trainer_for(tmp_path, **options, callbacks=[Slow(clock), StopAt(3)]))
    assert training_facts(first, **DESCRIBED).seconds == 30
    clock[0] += 1000
    again, at_logs = trainer_for(tmp_path, **options, callbacks=[Slow(clock)]), []
    again.log, log = lambda *args: (log(*args), at_logs.append(training_facts(again, **DESCRIBED).seconds)), again.log
    trained(again, resume=True)
    assert at_logs[:2] == [40, 60], "a card after an evaluation, before any checkpoint, has it"
    clock[0] += 1000  # the evaluations after it
    again.evaluate({"pairs": models.Pairs(4)})
    assert training_facts(again, **DESCRIBED).seconds == 70
    never = trained(trainer_for(tmp_path / "never", max_steps=1, logging_strategy="no", callbacks=[Slow(clock)]))
    assert training_facts(never, **DESCRIBED).seconds == 10


def test_captions_that_were_cut_are_told(tmp_path):
    assert "| captions |" not in read(facts(), tmp_path).text
    limited = facts(caption_limit=77)
    assert "| captions | the model reads the first 77 tokens of each |" in read(limited, tmp_path).text
    cut = facts(caption_limit=77, cut_captions={"training set": 0.25, "evaluation set of eval_pairs_*": 0.031})
    cut.save(tmp_path)
    assert (
        "tokens of each; longer, and so cut, are 25.0% of those of the training set and 3.1% of those of the "
        "evaluation set of eval_pairs_… |"
    ) in read(TrainingFacts.load(tmp_path), tmp_path).text


def test_prompts_and_the_example_are_those_of_the_run(tmp_path):
    card = read(facts(evaluations=[LABELLED]), tmp_path)
    assert "was classified into 2 classes with the prompt `a photo of a {}.`, such as `a photo of a cat.`." in card.text
    assert "widget" not in card.content, "no picture of the run is published unasked"
    several = dataclasses.replace(LABELLED, templates=[f"{n} {{}}" for n in range(80)])
    text = read(facts(evaluations=[several]), tmp_path).text
    assert "is the mean of the embeddings of 80 prompts, such as `0 cat`: `0 {}`, `1 {}`, " in text
    assert "`9 {}` and 70 more. The code below takes only the first prompt" in text


def test_the_card_and_the_curves_are_kept_up_to_date_during_the_training(tmp_path):
    seen = []

    def describe() -> TrainingFacts:
        return facts(name="my-clip", steps=trainer.state.global_step)

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            assert f"| {counted(state.global_step, 'optimizer step')}, " in (tmp_path / "README.md").read_text()
            seen.append((tmp_path / "curves.png").read_bytes())

    callback = CardCallback(describe)
    trainer = trainer_for(tmp_path, callbacks=[callback, Look()], save_strategy="steps", save_steps=1, max_steps=2)
    callback.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert not (tmp_path / "README.md").exists(), "nothing has been trained"
    trainer.train()
    first, second = seen
    assert first != second
    text = (tmp_path / "README.md").read_text()
    trainer.create_model_card()
    assert (tmp_path / "README.md").read_text() == text, "Trainer's draft does not replace the card"


def test_a_card_is_written_for_each_training_and_an_error_ends_none(tmp_path):
    names = iter(("first", "second", "third"))
    callback = CardCallback(lambda: facts(name=next(names)))
    trainer = trainer_for(tmp_path, callbacks=[callback], max_steps=1)
    card = tmp_path / "README.md"
    trainer.train()
    assert "first" in card.read_text()
    trainer.train()
    assert "second" in card.read_text(), "it has as many steps and entries in the log as the one before"
    card.unlink()
    card.mkdir()
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_callback_that_comes_after_the_training_writes_the_card_with_the_model(tmp_path):
    trainer = trained(trainer_for(tmp_path, max_steps=1))
    names = iter(("late", "again"))
    trainer.add_callback(callback := CardCallback(lambda: facts(name=next(names))))
    assert not (tmp_path / "README.md").exists()
    trainer.save_model()
    trainer.save_model()
    assert "# late" in (tmp_path / "README.md").read_text(), "the training has not gone on"
    callback.write(trainer.args, trainer.state)
    assert "# again" in (tmp_path / "README.md").read_text(), "its facts may have changed"
    modes = {(tmp_path / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1, "all may be read by whom the umask lets"


@pytest.mark.parametrize(
    ("high", "words"), [(0.02, "-0.0300 [-0.0800, +0.0200] within noise |"), (-0.01, "-0.0100] |")]
)
def test_a_change_stands_beside_its_interval(tmp_path, high, words):
    metrics = {**PAIRS, "image_retrieval_recall@1_low": 0.2, "image_retrieval_recall@1_high": 0.3}
    metrics |= {"score_change_low": -0.08, "score_change_high": high}
    before = {name: value + 0.03 for name, value in PAIRS.items()}
    made = facts(evaluations=[dataclasses.replace(RETRIEVAL, metrics=metrics, before=before)])
    card = read(made, tmp_path)
    assert words in card.text
    assert "| 0.2500 | 0.2000 to 0.3000 | 0.2800 |" in card.text
    assert "score change" not in card.text
    assert ("within noise" in "\n".join(lines_of_changes(made))) == (high > 0)


def test_pairs_and_classes_of_the_same_images_are_told_apart(tmp_path):
    pairs = dataclasses.replace(RETRIEVAL, before=PAIRS, metrics=PAIRS)
    names = {"templates": ["a {}"], "class_names": ["cat", "dog"]}
    classes = dataclasses.replace(pairs, key="zero_shot", before={"acc1": 0.3}, metrics={"acc1": 0.4}, **names)
    made = facts(evaluations=[pairs, classes], scores_by_width={"pairs": {"8": 0.1}, "zero_shot": {"8": 0.2}})
    place = f"{pairs.dataset}, split {pairs.split}"
    lines = list(lines_of_changes(made))
    assert [line[: len(place) + 12].strip() for line in lines[1:3]] == [f"{place} (captions)", f"{place} (classes)"]
    assert "recall@1 of pairs" in lines[-1]
    assert "top-1 accuracy" in lines[-1]
    assert "average precision" not in lines[-1]
    assert "In brackets" not in lines[-1], "no interval was measured"
    card = read(made, tmp_path).text
    for kind, score in (("captions", "0.1000"), ("classes", "0.2000")):
        assert f"`{pairs.dataset}`, split {pairs.split} ({kind}) | evaluation |" in card
        assert f"`{pairs.dataset}`, split {pairs.split} ({kind}) | first 8 | {score} |" in card
    assert next(iter(lines_of_changes(facts(evaluations=[pairs])))).startswith(" " * len(place) + "   before")


def test_the_ceiling_of_a_recall_stands_beside_it(tmp_path):
    metrics = {**PAIRS, "image_retrieval_recall@1_ceiling": 0.4, "text_retrieval_recall@1_ceiling": 1.0}
    measured = dataclasses.replace(RETRIEVAL, metrics=metrics)
    card = read(facts(evaluations=[measured]), tmp_path)
    assert "| image retrieval recall@1 | 0.2500 | 0.4000 |" in card.text
    guard = dataclasses.replace(measured, guard=True, before={"image_retrieval_recall@1": 0.3})
    both = "| image retrieval recall@1 | 0.2500 | 0.3000 | 0.4000 |"
    assert both in read(facts(evaluations=[guard]), tmp_path).text
    assert "| text retrieval recall@1 | 0.7500 |  |" in card.text
    assert "belong to several images" in card.text
    assert not [result for result in card.data.eval_results if "ceiling" in result.metric_name]
    history = [{"step": 1, "loss": 1.0}, {"step": 1, "eval_image_retrieval_recall@1": 0.25}]
    plot_curves(history, tmp_path / "without.png")
    history[1]["eval_image_retrieval_recall@1_ceiling"] = 0.4
    plot_curves(history, tmp_path / "with.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_curves_are_drawn(tmp_path):
    history = [{"step": step, "loss": 1 / step, "learning_rate": 0.1} for step in range(1, 5)]
    plot_curves(history, tmp_path / "loss.png")
    history += [{"step": step, "eval_a_acc1": 0.5, "eval_b_loss": 1.0, "eval_a_acc5": None} for step in (2, 4)]
    history += [{"step": 5, "loss": math.inf, "eval_c_loss": math.nan}]
    plot_curves(history, tmp_path / "all.png")
    with Image.open(tmp_path / "loss.png") as one, Image.open(tmp_path / "all.png") as three:
        assert one.width == three.width > 1000
        assert three.height > 2 * one.height, "panels of their own for evaluation losses and scores"
        assert len(three.convert("RGB").getcolors(2**24)) > 100


def test_names_of_curves_hide_none_and_the_best_weights_evaluation_is_no_point_of_the_last_step(tmp_path, monkeypatch):
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure) or save(figure, path))
    scores = {f"eval_guard{n}_some_data_set_{way}_retrieval_recall@1": 0.9 for n in (1, 2) for way in ("image", "text")}
    plot_curves([{"step": 1, "loss": 1.0}, {"step": 2, **scores, "eval_a_loss": 2.0}], tmp_path / "curves.png")
    for axis in drawn[0].axes:
        names = axis.get_legend().get_window_extent()
        assert names.y0 >= axis.bbox.y1 - 1
        assert names.x1 <= drawn[0].bbox.x1
    again = {"step": 2, **dict.fromkeys(scores, 0.5)}
    plot_curves([{"step": 1, "loss": 1.0}, {"step": 2, **scores}, again], tmp_path / "best.png")
    assert [list(line.get_ydata()) for line in drawn[1].axes[1].lines] == [[0.9]] * 4


def test_axes_show_the_range_of_their_values(tmp_path, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure) or path.touch())
    bounds = {"eval_a_acc1_low": 0.3, "eval_a_acc1_high": 0.5}
    history = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 4.5}, {"step": 2, "eval_a_acc1": 0.4, **bounds}]
    plot_curves(history, tmp_path / "curves.png")
    plot_curves([*history, {"step": 3, "eval_b_acc1": 1.0}, {"step": 3, "eval_c_acc1": 0.0}], tmp_path / "all.png")
    (losses, shares), (_, every) = (figure.axes for figure in drawn)
    assert 3.9 < losses.get_ylim()[0] < 4.0 < 4.5 < losses.get_ylim()[1] < 4.6
    assert 0.2 < shares.get_ylim()[0] < 0.3 < 0.5 < shares.get_ylim()[1] < 0.6, "the interval is shown as well"
    assert every.get_ylim() == (-0.02, 1.02)


def test_curves_without_losses_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no training loss"):
        plot_curves([{"step": 1, "eval_loss": 1.0}], tmp_path / "x.png")


# ---- Pictures ----


class LostTracker(TrainerCallback):
    """A tracker like TensorBoardCallback whose server does not answer."""

    class tb_writer:  # noqa: N801
        @staticmethod
        def add_image(*args: Any, **kwargs: Any) -> None:
            raise ConnectionError("the server does not answer")


def test_pictures_mark_what_is_right_and_wrong_and_cut_what_is_long(monkeypatch):
    written: list[tuple[str, str]] = []
    text = pictures.ImageDraw.ImageDraw.text

    def write(pen: Any, place: Any, words: str, colour: str, font: Any) -> None:
        written.append((words, colour))
        text(pen, place, words, colour, font)

    monkeypatch.setattr(pictures.ImageDraw.ImageDraw, "text", write)
    found = [("word " * 40, 0.5, False), ("a dog", 0.25, True)]
    picture = pictures.draw([np.zeros((8, 8, 3), np.uint8)], [found], [["a dog", "dogs"]])
    assert [words for words, _ in written] == [
        "right:  a dog  (and 1 more)",
        f"0.500  {' '.join(['word'] * 15)} …",
        "0.250  a dog",
    ]
    wrong, right = (Image.new("RGB", (1, 1), colour).getpixel((0, 0)) for _, colour in written[1:])
    for colour in (wrong, right):
        assert any(pixel == colour for _, pixel in picture.getcolors(1 << 20))
    left, tops = pictures.SIDE + 28, (8 + pictures.LINE, 8 + 2 * pictures.LINE)
    marks = [picture.crop((left, top, left + 16, top + 16)) for top in tops]
    shapes = [np.array(mark.convert("L")) < 200 for mark in marks]
    assert shapes[0].any()
    assert not np.array_equal(*shapes), "not by the colour alone"


def test_pictures_show_images_with_the_captions_of_the_highest_cosines(tmp_path, monkeypatch):
    captions = [["a b", "c"], ["d"], ["e f g"], ["h", "i", "j k"]]
    g = torch.Generator().manual_seed(0)
    images = [torch.randint(256, (20, 16, 3), generator=g, dtype=torch.uint8).numpy() for _ in captions]
    rows = datasets.Dataset.from_dict({"image": [Image.fromarray(image) for image in images], "caption": captions})
    dataset = ImageTextDataset(rows, all_captions=True)
    model, processor = models.clip(), processors.clip_processor()
    trainer = InfCLTrainer(
        model, arguments(tmp_path), eval_dataset={"pairs": dataset, "others": dataset}, processing_class=processor
    )
    callback, drawn = PicturesCallback(trainer, dataset, 2), []
    with pytest.raises(ValueError, match="replaces compute_metrics"):
        PicturesCallback(trainer, dataset, 2)
    best_captions = callback.best_captions
    monkeypatch.setattr(callback, "best_captions", lambda measured: drawn.append(best_captions(measured)) or drawn[-1])
    trainer.evaluate()
    (found_captions,) = drawn  # of one of the two sets

    texts = [text for own in captions for text in own]
    inputs = processor(text=texts, images=images, padding="max_length", return_tensors="pt")
    with torch.no_grad():
        cosines = model.eval()(**inputs).logits_per_image / model.logit_scale.exp()
    for row, found in zip((0, 2), found_captions, strict=True):
        best = cosines[row].topk(3)
        assert found == [
            (texts[index], pytest.approx(cosine, abs=1e-4), texts[index] in captions[row])
            for cosine, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
    with Image.open(tmp_path / PICTURES_FILE) as picture:
        assert picture.size[1] > 2 * 96
        assert len(picture.getcolors(1 << 20)) > 300, "both images are in it"
    (tmp_path / PICTURES_FILE).unlink()
    (tmp_path / PICTURES_FILE).mkdir()
    assert "eval_pairs_loss" in trainer.evaluate(), "a picture that cannot be written does not end a training"
    (tmp_path / PICTURES_FILE).rmdir()
    trainer.add_callback(LostTracker)
    assert "eval_pairs_loss" in trainer.evaluate(), "a tracker that does not take the picture does not end a training"
    assert (tmp_path / PICTURES_FILE).is_file()
    model_card(facts(), pictures=PICTURES_FILE).save(tmp_path / "README.md")
    assert f"]({PICTURES_FILE})" in (tmp_path / "README.md").read_text()
