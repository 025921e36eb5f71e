"""Texts of a training: dealt out to micro-batches by their length, cut, and with words left out."""

from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import transformers
from helpers import models
from helpers.parity import PadsToLongest, train
from helpers.pictures import captioned
from helpers.processors import clip_processor
from helpers.trainers import parameters, trained, trainer_for
from PIL import Image
from test_model_types import KINDS
from torch.utils.data import default_collate

from hf_infcl import ContrastiveCollator, ImageTextDataset, TwoTowers
from hf_infcl.data.pairs import usable_captions
from hf_infcl.models.counting import count_operations
from hf_infcl.models.dual_encoder import IMAGE_FEATURES, NO_MASK, NO_TEXTS, TEXT_INPUTS, DualEncoder
from hf_infcl.models.model_types import MODEL_TYPES
from hf_infcl.step.window import Window, deal_texts


def batches_of(lengths: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of texts whose tokens are all the number of their row, padded with 1 to the longest."""
    batches, row = [], 10
    for part in lengths:
        ids, mask = torch.ones(len(part), max(part), dtype=torch.int64), torch.zeros(len(part), max(part)).long()
        for place, length in enumerate(part):
            ids[place, :length], mask[place, :length] = row, 1
            row += 1
        batches.append({"pixel_values": torch.zeros(len(part), 3, 2, 2), "input_ids": ids, "attention_mask": mask})
    return batches


def without_texts(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with a placeholder for its texts."""
    return {name: value[:1] if name in TEXT_INPUTS else value for name, value in batch.items()} | {NO_TEXTS: True}


def test_the_longest_texts_come_first_and_nothing_is_padded_beyond_them():
    batches = batches_of([[3, 20, 5], [9, 2, 30], [16, 17, 1]])
    places = deal_texts(batches, PadsToLongest.text_padding)
    assert [batch["input_ids"].shape for batch in batches] == [(3, 30), (3, 16), (3, 8)]
    assert [batch["attention_mask"].sum(1).tolist() for batch in batches] == [[30, 20, 17], [16, 9, 5], [3, 2, 1]]
    rows = torch.cat([batch["input_ids"][:, 0] for batch in batches])
    assert rows[places].tolist() == list(range(10, 19))
    for batch in batches:
        assert torch.equal(batch["input_ids"] != 1, batch["attention_mask"] == 1)


def test_rows_of_a_window_come_back_in_the_order_of_its_images():
    window = Window(batches_of([[3, 20], [9, 2], [16, 4]]), PadsToLongest.text_padding)
    of_texts = torch.cat([batch["input_ids"][:, 0] for batch in window.batches])
    images, texts = window.in_order((torch.arange(6), of_texts))
    assert (images.tolist(), texts.tolist()) == (list(range(6)), list(range(10, 16)))
    assert window.in_order((images, texts[:0]))[1].numel() == 0, "a frozen tower has no gradients"
    untouched = Window(batches_of([[3, 20], [9, 2]]))
    assert torch.equal(untouched.in_order((images, texts))[1], texts)


@pytest.mark.parametrize("kind", models.BUILD)
def test_padding_changes_no_embedding_but_siglip_s(kind):
    model = models.BUILD[kind]().eval()
    collator = ContrastiveCollator.for_model(clip_processor(), model.config)
    assert (collator.text_padding is None) == kind.startswith("siglip"), "whose captions keep one length"
    encoder, (batch,) = DualEncoder(model), batches_of([[3, 6, 5, 2]])
    batch["input_ids"] = torch.randint(2, models.VOCABULARY - 1, (4, 6)) * batch["attention_mask"]
    last = batch["attention_mask"].sum(1) - 1
    batch["input_ids"][torch.arange(4), last] = models.VOCABULARY - 1  # the end of the text
    padded = {name: torch.nn.functional.pad(values, (0, 7)) for name, values in batch.items() if values.ndim == 2}
    with torch.no_grad():
        difference = (encoder.encode_texts(padded) - encoder.encode_texts(batch)).abs().max()
    assert (difference > 0.01) if kind.startswith("siglip") else (difference < 1e-6)


@pytest.mark.parametrize(
    ("at_once", "last_has_texts", "sizes"),
    [
        (2, False, [4, 4, 0, 0]),
        (3, False, [6, 2, 0, 0]),
        (9, False, [8, 0, 0, 0]),
        (2, True, [4, 2, 0, 2]),
        (9, True, [6, 0, 0, 2]),
    ],
)
@pytest.mark.parametrize("padding", [PadsToLongest.text_padding, None])
def test_texts_of_several_micro_batches_are_put_together(at_once, last_has_texts, sizes, padding):
    batches = batches_of([[20, 20], [9, 20], [16, 20], [20, 5]])
    for batch in batches:
        batch["start_texts"] = batch["input_ids"][:, :1].float()
    window = Window(batches, padding, at_once, last_has_texts=last_has_texts)
    seen = [0 if batch.get("no_texts") else len(batch["input_ids"]) for batch in batches]
    assert seen == sizes == [len(batch["start_texts"]) for batch in batches]
    assert all(len(batch["input_ids"]) == len(batch["attention_mask"]) == 1 for batch in batches if "no_texts" in batch)
    assert window.sizes == [[2] * 4, [2] * 4]
    rows = torch.cat([batch["input_ids"][:, 0] for batch in batches if "no_texts" not in batch])
    assert window.in_order((torch.arange(8), rows))[1].tolist() == list(range(10, 18))
    starts = torch.cat([batch["start_texts"] for batch in batches])
    assert torch.equal(starts.flatten().long(), rows)


def test_texts_of_unknown_padding_are_not_put_together():
    with pytest.raises(ValueError, match=r"texts_at_once=2 needs texts of one length.*of 9 and 20 tok"):
        Window(batches_of([[3, 20], [9, 2]]), None, 2)


@pytest.mark.parametrize("kind", models.BUILD)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_micro_batch_without_texts_has_the_image_embeddings_alone(kind, compiled):
    model = models.BUILD[kind]().eval()
    encoder, batch = DualEncoder(model), models.batch_for(kind, 3)
    images, _ = encoder.embed(model, batch, {})
    alone = without_texts(batch)
    runs = []
    model.text_model.register_forward_hook(lambda *_: runs.append(1))
    for _ in range(2):
        again, texts = encoder.embed(model, alone, None if compiled else {})
        torch.testing.assert_close(again, images)
        assert texts.shape == (0, images.shape[1])
    (again.sum() + texts.sum()).backward()
    gradients = [p.grad for n, p in model.named_parameters() if n.startswith("text_") and p.grad is not None]
    assert not any(g.any() for g in gradients)


def test_a_placeholder_is_finite_and_draws_no_random_numbers():
    model = models.clip(dropout=0.5)
    encoder, batch = DualEncoder(model), models.batch_for("clip", 3)
    alone = without_texts(batch)
    weight = model.text_model.final_layer_norm.weight
    with torch.no_grad():
        weight.mul_(torch.nan)
        encoder.embed(model, alone, {})
        weight.fill_(1)
    state = torch.get_rng_state()
    model.vision_model.eval()
    images, texts = encoder.embed(model, alone, {})
    assert torch.equal(state, torch.get_rng_state())
    assert model.text_model.training
    (images.sum() + texts.sum()).backward()
    assert model.text_projection.weight.grad.isfinite().all(), "the text of a window that was skipped"
    half = {**alone, "pixel_values": batch["pixel_values"].bfloat16()}
    assert encoder.embed(model.bfloat16(), half, {})[1].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", models.BUILD)
def test_a_placeholder_changes_nothing(kind):
    model = models.BUILD[kind]().train()
    encoder, batch = DualEncoder(model), models.batch_for(kind, 3)
    alone = without_texts(batch)
    before = {name: value.clone() for name, value in model.named_buffers() if not name.startswith("vis")}
    for frozen_outputs in ({}, None):
        encoder.embed(model, alone, frozen_outputs)
    assert all(module.training for module in model.modules())
    for name, value in model.named_buffers():
        assert name not in before or torch.equal(value, before[name]), name


def test_a_frozen_text_tower_remembers_no_placeholder():
    encoder, batch = DualEncoder(models.clip()), models.batch_for("clip", 3)
    encoder.freeze("text")
    frozen_outputs: dict[str, object] = {}
    encoder.embed(encoder.model, without_texts(batch), frozen_outputs)
    assert not frozen_outputs


@pytest.mark.parametrize("kind", models.BUILD)
def test_a_micro_batch_without_texts_takes_cached_image_features(kind):
    model = models.BUILD[kind]().eval()
    encoder, batch = DualEncoder(model), models.batch_for(kind, 3)
    encoder.freeze("image")
    images, _ = encoder.embed(model, batch)
    alone = without_texts(batch) | {IMAGE_FEATURES: encoder.image_features(batch).detach()}
    del alone["pixel_values"]
    again, texts = encoder.embed(model, alone, {})
    torch.testing.assert_close(again, images)
    assert len(texts) == 0


@pytest.mark.parametrize("kind", ["clip", "siglip", "two towers"])
def test_a_compiled_model_is_compiled_once_without_its_text_tower(kind):
    graphs: list[int] = []  # the parameters of the text tower in each of them

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append(sum("text_model" in name and "parameters" in name for name in names))
        return graph.forward

    model = {**models.BUILD, **models.OWN}[kind]()
    encoder, batch = DualEncoder(model), models.batch_for(kind, 3)
    alone = without_texts(batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        images, texts = encoder.embed(compiled, batch)
        again, none = encoder.embed(compiled, alone)
        torch.testing.assert_close(again, images)
        assert (len(texts), len(none)) == (3, 0)
    torch._dynamo.reset()
    with_texts, without = graphs
    assert with_texts > 10
    assert without == 0


class _FixedTexts(torch.nn.Module):
    """Embeds texts of just one length, as OpenAI's CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(models.VOCABULARY, 12)
        self.places = torch.nn.Parameter(torch.randn(16, 12))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return (self.tokens(input_ids) + self.places).mean(1)


def test_texts_of_one_length_keep_it(tmp_path):
    images = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * models.IMAGE**2, 12))
    pairs = models.Pairs(16)
    pairs.tokens, pairs.mask = (torch.cat([part] * 3, 1)[:, :16] for part in (pairs.tokens, pairs.mask))
    options = {"gradient_accumulation_steps": 3, "max_steps": 2, "per_device_train_batch_size": 2, "texts_at_once": 2}
    trainer_for(tmp_path, TwoTowers(images, _FixedTexts()), pairs, **options).train()


@pytest.mark.parametrize(
    "options",
    [
        {"keep_features": 1.0},
        {"offload_inputs": True},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=str,
)
def test_training_with_texts_put_together_is_the_same(tmp_path, options):
    ends = []
    for at_once in (1, 3):
        torch.manual_seed(0)
        settings = {"gradient_accumulation_steps": 3, "max_steps": 3, "optim": "sgd", "learning_rate": 0.1, **options}
        trainer = trained(trainer_for(tmp_path, models.clip(), models.Pairs(48), texts_at_once=at_once, **settings))
        ends.append(parameters(trainer))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)


@pytest.mark.parametrize("missing", ["attention_mask", "position_ids"])
def test_texts_without_a_mask_or_with_other_tensors_stay_where_they_are(missing):
    batches = batches_of([[3, 20], [9, 2]])
    for batch in batches:
        if missing == "attention_mask":
            del batch["attention_mask"]
        else:
            batch["position_ids"] = torch.zeros_like(batch["input_ids"])
    before = [batch["input_ids"] for batch in batches]
    assert deal_texts(batches, PadsToLongest.text_padding) is None
    assert all(a is b["input_ids"] for a, b in zip(before, batches, strict=True))


def test_the_text_tower_computes_less_for_the_same_loss():
    forward, tokens = transformers.CLIPModel.forward, []

    def counting(model: Any, *, input_ids: torch.Tensor, **inputs: Any) -> Any:
        tokens.append(input_ids.numel())
        return forward(model, input_ids=input_ids, **inputs)

    losses, computed = [], []
    for padding in (None, PadsToLongest.text_padding):
        tokens.clear()
        with (
            mock.patch.object(transformers.CLIPModel, "forward", counting),
            mock.patch.object(PadsToLongest, "text_padding", padding),
        ):
            trainer = train("softmax", "lengths", 1, 4, retain_graphs="4")
        losses.append(trainer.state.log_history[0]["loss"])
        computed.append(sum(tokens))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert computed[1] == 12 * (16 + 16 + 16 + 8) < computed[0]


# ---- Shorter captions ----


def rows(captions: list[str]) -> datasets.Dataset:
    pictures = [Image.fromarray(np.full((16, 16, 3), 9 * n, np.uint8)) for n in range(len(captions))]
    return datasets.Dataset.from_dict({"image": pictures, "caption": captions})


def test_captions_are_cut_in_training_alone(tmp_path):
    seen: dict[bool, set[int]] = {True: set(), False: set()}
    forward = transformers.CLIPTextModel.forward

    def noting(tower: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
        seen[tower.training].add(int(input_ids.shape[1]))
        assert (input_ids == 1).any(1).all(), "the end token stays"
        return forward(tower, input_ids=input_ids, **inputs)

    model = models.clip_with({"eos_token_id": 1, "pad_token_id": 0}, {})
    pairs = rows(["a b c d e f g h i j"] * 4)
    options: dict[str, Any] = {"eval_dataset": ImageTextDataset(pairs, all_captions=True)}
    options |= {"per_device_train_batch_size": 2, "max_text_tokens": 5, "max_steps": 1}
    with mock.patch.object(type(model.text_model), "forward", noting):
        trained(trainer_for(tmp_path, model, ImageTextDataset(pairs), **options)).evaluate()
    (cut,), (whole,) = seen[True], seen[False]
    assert cut == 5 < whole


@pytest.mark.parametrize(
    ("tokens", "collator", "message"),
    [
        (1, None, "max_text_tokens must be from 2, a token beside the special ones, to 7"),
        (8, None, "max_text_tokens must be from 2, .* to 7, one less than captions have at most anyway, got 8"),
        (8, default_collate, "max_text_tokens=8 needs a ContrastiveCollator"),
        (8, "fixed", "reads the padding of its captions like text, and was trained with 16 tokens"),
    ],
)
def test_a_length_that_captions_cannot_have_is_told(tmp_path, tokens, collator, message):
    if collator == "fixed":
        collator = ContrastiveCollator(clip_processor(), max_length=16, fixed_length=True)
    options = {"processing_class": clip_processor(), "data_collator": collator, "max_text_tokens": tokens}
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, models.clip(), ImageTextDataset(rows(["a"] * 4)), **options)


def test_more_tokens_than_the_tokenizer_states_are_read_everywhere_and_saved(tmp_path, caplog):
    pairs = rows(["a b c d e f g h i j k l m n o p"] * 4)
    given: dict[str, Any] = {"eval_dataset": ImageTextDataset(pairs, all_captions=True), "max_steps": 1}
    lengths = {}
    for tokens in (None, 12, 16):
        options = {**given, "max_text_tokens": tokens, "per_device_train_batch_size": 2}
        # It has 16 positions; the tokenizer states 8.
        model, seen = models.clip_with({"eos_token_id": 1, "pad_token_id": 0}, {}), set()
        model.text_model.register_forward_pre_hook(
            lambda _, __, inputs, seen=seen: seen.add(inputs["input_ids"].shape[1]), with_kwargs=True
        )
        trainer = trained(trainer_for(tmp_path / str(tokens), model, ImageTextDataset(pairs), **options))
        trainer.evaluate()
        trainer.save_model()
        saved = transformers.AutoProcessor.from_pretrained(trainer.args.output_dir).tokenizer.model_max_length
        lengths[tokens] = seen, saved
        told = "the model has 16 positions: to read longer texts, also in evaluations, pass max_text_tokens=16"
        assert (told in caplog.text) == (tokens != 16)
        caplog.clear()
    assert lengths == {None: ({8}, 8), 12: ({12}, 12), 16: ({16}, 16)}
    with pytest.raises(ValueError, match=r"got 17\. The tokenizer states the limit of 8 tokens, and the model has 16"):
        trainer_for(tmp_path, model, ImageTextDataset(pairs), **given, max_text_tokens=17)


def test_the_tower_computes_less_for_shorter_captions():
    encoder, batch = DualEncoder(models.clip()), models.Pairs(8).batch()
    whole = count_operations(encoder, batch)
    tokens = batch["input_ids"].shape[1] // 2
    cut = count_operations(encoder, batch | {name: batch[name][:, :tokens] for name in ("input_ids", "attention_mask")})
    assert cut[0] == whole[0]
    assert cut[1][0] < 0.6 * whole[1][0]


@pytest.mark.parametrize(
    ("text", "captions"),
    [
        ('["a red", "b red"]', ["a red", "b red"]),
        ("['a red', \"b's\", None]", ["a red", "b's"]),
        ('["caf\\u00e9"]', ["café"]),
        ("[a red fox]", ["[a red fox]"]),
        ("[1, 2]", ["[1, 2]"]),
        ("[]", []),
        ("[sic] he said", ["[sic] he said"]),
        ('["a red", null, "\\ud83d\\ude00 cat"]', ["a red", "😀 cat"]),  # of json.dumps
        ("['a red' \"b's\"\n 'c']", ["a red", "b's", "c"]),  # of numpy
        ("('a red', 'b red')", ["a red", "b red"]),
        ('("Untitled")', ['("Untitled")']),
        ("['a red', 'it's red']", []),
        ("[['a red']]", []),
    ],
)
def test_a_list_that_is_stored_as_text_is_a_list(text, captions):
    assert usable_captions(text) == captions


def test_a_list_as_text_that_cannot_be_read_is_told():
    with pytest.raises(ValueError, match=r"no caption in column 'caption', as \"\['a', 'it's'\]\" cannot be read"):
        ImageTextDataset(captioned(["['a', 'it's']"]))[0]


@pytest.mark.parametrize("kind", sorted(kind for kind, facts in MODEL_TYPES.items() if facts.texts))
def test_causal_towers_need_no_mask_if_padding_is_on_the_right(kind):
    model, batch = KINDS[kind]().eval(), models.batch_for(kind)
    batch |= {name: value for name, value in models.Pairs(5, longest=9).batch().items() if name in TEXT_INPUTS}
    encoder, tokens, mask = DualEncoder(model), batch["input_ids"], batch["attention_mask"]
    if kind == "aimv2":
        assert encoder.reads_to_end is None
        return
    assert encoder.reads_to_end is not None
    needs_mask = encoder.reads_to_end.needs_mask
    assert not needs_mask(tokens, mask)
    weights = torch.linspace(-1, 1, 5 * encoder.width()).view(5, -1)
    results = []
    for inputs in (batch, batch | {NO_MASK: True}):
        embeds = encoder.embed(model, inputs)
        loss = (embeds[0] * weights).sum() + (embeds[1] * weights).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        results.append([*embeds, *(one for one in gradients if one is not None)])
    for masked, unmasked in zip(*results, strict=True):
        torch.testing.assert_close(unmasked, masked, rtol=1e-4, atol=1e-6)
    assert needs_mask(tokens, mask.flip(1)), "padding on the left"
    behind = tokens * mask % (models.VOCABULARY - 1)  # no text has an end
    behind[:, -1] = models.VOCABULARY - 1
    assert needs_mask(behind, mask), "the embedding is taken in the padding"


@pytest.mark.parametrize("kind", ["siglip", "blip", "align", "two towers"])
def test_other_towers_get_their_mask(kind):
    assert DualEncoder(KINDS[kind]()).reads_to_end is None


def test_a_window_needs_the_mask_if_one_of_its_batches_does():
    for flags, left in (([True, True], True), ([True, False], None)):
        window = Window(
            [batch | {NO_MASK: flag} for batch, flag in zip(batches_of([[3, 20], [9, 2]]), flags, strict=True)]
        )
        assert [batch.get(NO_MASK) for batch in window.batches] == [left] * 2
