"""`ExactContrastiveLoss` has the loss and the gradients of sentence-transformers' own loss over the whole batch."""

import copy
import itertools
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import models
from helpers.demo import SCRIPTS
from helpers.guides import block_of, replaced
from helpers.pictures import picture
from helpers.processors import clip_processor
from sentence_transformers import SentenceTransformer, util
from sentence_transformers.sentence_transformer import losses, modules
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hf_infcl.step.own_loop import ExactContrastiveLoss

Features = list[dict[str, Any]]
VOCABULARY = 90
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def saved_bert(folder: Path, dropout: float = 0.0) -> Path:
    torch.manual_seed(0)
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=40, **TINY, **dropouts)
    transformers.BertModel(config).save_pretrained(folder)
    clip_processor().tokenizer.save_pretrained(folder)
    return folder


def bert(folder: Path, dropout: float = 0.0) -> SentenceTransformer:
    """A BERT of random weights with mean pooling, which reads the words of `clip_processor`."""
    if not (folder / "config.json").exists():
        saved_bert(folder, dropout)
    transformer = modules.Transformer(str(folder), max_seq_length=32)
    return SentenceTransformer(modules=[transformer, modules.Pooling(16)], device="cpu")


def decoder(folder: Path) -> SentenceTransformer:
    """A GPT-2 in float64 that is padded on the left and pooled at its last token."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    transformers.GPT2Model(config).save_pretrained(folder)
    clip_processor().tokenizer.save_pretrained(folder)
    transformer = modules.Transformer(str(folder), max_seq_length=32)
    transformer.tokenizer.padding_side = "left"
    model = SentenceTransformer(modules=[transformer, modules.Pooling(16, pooling_mode="lasttoken")], device="cpu")
    return model.double()


def texts(rows: int, columns: int, first: int = 0) -> list[list[str]]:
    """Texts of one to nine letters, other ones in each column."""
    letters = "abcdefghijklmnopqrstuvwxyz" * 2
    return [
        [" ".join(letters[(n * 3 + 7 * c) % 26 :][: 1 + (n * 5 + c) % 9]) for n in range(first, first + rows)]
        for c in range(columns)
    ]


def tokens(model: SentenceTransformer, columns: list[list[str]], **options: Any) -> Features:
    return [dict(model.preprocess(column, **options)) for column in columns]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def computed(loss: nn.Module, features: Features, labels: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    value = loss(copy.deepcopy(features), labels)
    value.backward()
    return value.item(), gradients(loss.model)


def check(
    found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], limit: float = 1e-5
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    floor = 1e-6 * sum(g.norm().item() for g in expected[1].values())  # key biases have none but for rounding
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= limit * gradient.norm() + floor, name


def plain(model: SentenceTransformer, features: Features, **options: Any) -> tuple[float, dict[str, Tensor]]:
    return computed(losses.MultipleNegativesRankingLoss(model, **options), features)


SPLITS = [{"mini_batch_size": 1}, {"mini_batch_size": 5}, {"mini_batch_num_tokens": 40}, {"retain_graphs": 3}, {}]


@pytest.mark.parametrize("columns", [2, 3, 5])
def test_it_is_the_loss_of_sentence_transformers_however_the_batch_is_split(tmp_path, columns):
    model = bert(tmp_path)
    features = tokens(model, texts(13, columns))
    expected = plain(model, features)
    assert expected[0] > 0.5
    for split in SPLITS:
        check(computed(ExactContrastiveLoss(model, **split), features), expected)
    dot = plain(model, features, similarity_fct=util.dot_score, scale=0.3)
    check(computed(ExactContrastiveLoss(model, 0.3, util.dot_score, mini_batch_size=4), features), dot)


def test_both_directions(tmp_path):
    model = bert(tmp_path)
    features = tokens(model, texts(9, 3))
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    check(computed(ExactContrastiveLoss(model, mini_batch_size=2, **both), features), plain(model, features, **both))


def test_texts_are_sorted_and_padded_no_further_than_their_mini_batch(tmp_path):
    model = bert(tmp_path)
    features = tokens(model, texts(40, 2))
    widths: list[tuple[int, int]] = []
    model[0].auto_model.embeddings.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    computed(ExactContrastiveLoss(model, mini_batch_num_tokens=44), features)
    assert max(rows * width for rows, width in widths) <= 44
    real = sum(int(column["attention_mask"].sum()) for column in features)
    assert sum(rows * width for rows, width in widths[: len(widths) // 2 + 1]) < 1.3 * real


@pytest.mark.parametrize("kind", ["prompts", "lora", "checkpointing", "frozen", "labels"])
def test_what_models_have(tmp_path, kind):
    model = bert(tmp_path)
    options: dict[str, Any] = {}
    features = tokens(model, texts(9, 2), **({"prompt": "x y "} if kind == "prompts" else {}))
    if kind == "lora":
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))
    elif kind == "checkpointing":
        model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    elif kind == "frozen":
        model[0].auto_model.embeddings.requires_grad_(False)
    elif kind == "labels":
        texts_of = texts(9, 2)
        texts_of[1][4] = texts_of[1][2]  # the same document
        features = tokens(model, texts_of)
        labels = torch.tensor([0, 1, 2, 3, 2, 5, 6, 7, 8])
        with_ids = computed(ExactContrastiveLoss(model, labels_are_ids=True, mini_batch_size=2), features, labels)
        rows = [model(dict(column))["sentence_embedding"] for column in copy.deepcopy(features)]
        scores = 20 * util.cos_sim(*rows)
        scores[2, 4] = scores[4, 2] = -torch.inf
        value = nn.functional.cross_entropy(scores, torch.arange(9))
        value.backward()
        check(with_ids, (value.item(), gradients(model)))
        return
    expected = plain(model, features, **options)
    for split in ({"mini_batch_size": 4}, {"retain_graphs": 2, "mini_batch_num_tokens": 30}):
        check(computed(ExactContrastiveLoss(model, **split), features), expected)


def test_dropout_draws_the_same_masks_in_both_passes(tmp_path):
    model = bert(tmp_path, dropout=0.3)
    model.train()
    features = tokens(model, texts(12, 2))
    found = []
    for graphs in (1, 2, 100):
        torch.manual_seed(3)
        found.append(computed(ExactContrastiveLoss(model, mini_batch_size=3, retain_graphs=graphs), features))
    check(found[0], found[2])
    check(found[1], found[2])
    torch.manual_seed(4)
    other = computed(ExactContrastiveLoss(model, mini_batch_size=3), features)
    assert other[0] != pytest.approx(found[0][0], rel=1e-3), "there is no dropout: the test says nothing"


def test_a_decoder_that_is_padded_on_the_left(tmp_path):
    model = decoder(tmp_path)
    features = tokens(model, texts(11, 3))
    assert int(features[0]["attention_mask"][:, 0].min()) == 0
    expected = plain(model, features)
    check(computed(ExactContrastiveLoss(model, mini_batch_size=3), features), expected, 1e-9)
    check(computed(ExactContrastiveLoss(model, mini_batch_num_tokens=25, retain_graphs=2), features), expected, 1e-9)


def test_an_accumulation_and_a_scaled_loss(tmp_path):
    model = bert(tmp_path)
    batches = [tokens(model, texts(6, 2)), tokens(model, texts(6, 2, first=50))]
    found = []
    for loss in (losses.MultipleNegativesRankingLoss(model), ExactContrastiveLoss(model, mini_batch_size=2)):
        for features in batches:
            (loss(copy.deepcopy(features), None) * 1024 / 2).backward()
        found.append((1.0, gradients(model)))
    check(found[1], found[0])


def test_two_losses_at_once_and_no_second_backward(tmp_path):
    model = bert(tmp_path)
    one, two = tokens(model, texts(6, 2)), tokens(model, texts(8, 2, first=50))
    theirs = losses.MultipleNegativesRankingLoss(model)
    (theirs(copy.deepcopy(one), None) + theirs(copy.deepcopy(two), None)).backward()
    expected = gradients(model)
    loss = ExactContrastiveLoss(model, mini_batch_size=3, retain_graphs=2)
    total = loss(one, None) + loss(two, None)
    total.backward(retain_graph=True)
    check((1.0, gradients(model)), (1.0, expected))
    with pytest.raises(RuntimeError, match="runs once: compute the loss again"):
        total.backward()


def test_matryoshka_around_it(tmp_path):
    model = bert(tmp_path)
    features = tokens(model, texts(9, 3))
    found = []
    for make in (losses.MultipleNegativesRankingLoss, ExactContrastiveLoss):
        inner = make(model) if make is not ExactContrastiveLoss else make(model, mini_batch_size=4)
        around = losses.MatryoshkaLoss(model, inner, [16, 8, 4], [1.0, 0.5, 2.0])
        found.append(computed(around, features))
    check(found[1], found[0])


def test_clip_through_sentence_transformers(tmp_path):
    processor = clip_processor()
    models.clip(end=processor.tokenizer.eos_token_id).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    model = SentenceTransformer(str(tmp_path), device="cpu")
    columns = [[picture(n, (20, 24)) for n in range(7)], ["a b", "c", "d e f", "g", "h i", "j k l m", "n"]]
    features = [dict(model.preprocess(column)) for column in columns]
    check(computed(ExactContrastiveLoss(model, mini_batch_size=2), features), plain(model, features))


def test_a_router_and_a_frozen_route(tmp_path):
    (tmp_path / "q").mkdir()
    (tmp_path / "d").mkdir()
    query, document = bert(tmp_path / "q"), bert(tmp_path / "d")
    with torch.no_grad():
        for parameter in document.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for frozen in (None, query, document):
        router = modules.Router.for_query_document(list(query.children()), list(document.children()))
        model = SentenceTransformer(modules=[router], device="cpu")
        model.requires_grad_(True)
        if frozen is not None:
            frozen.requires_grad_(False)
        columns = texts(9, 2)
        tasks = zip(columns, ("query", "document"), strict=True)
        features = [{**model.preprocess(column, task=task), "task": task} for column, task in tasks]
        check(computed(ExactContrastiveLoss(model, mini_batch_size=2), features), plain(model, features))


def test_an_evaluation_draws_and_registers_nothing(tmp_path):
    model = bert(tmp_path)
    features = tokens(model, texts(9, 2))
    expected = plain(model, features)
    state = torch.get_rng_state()
    with torch.no_grad():
        value = ExactContrastiveLoss(model, mini_batch_size=2)(features, None)
    assert value.item() == pytest.approx(expected[0], rel=1e-6)
    assert not value.requires_grad
    assert torch.equal(state, torch.get_rng_state())


def test_bf16_is_near_the_loss_in_fp32(tmp_path):
    model = bert(tmp_path)
    features = tokens(model, texts(16, 2))
    expected = computed(ExactContrastiveLoss(model), features)
    with torch.autocast("cpu", torch.bfloat16):
        value = ExactContrastiveLoss(model, mini_batch_size=4)(copy.deepcopy(features), None)
    value.backward()  # as trainers do, outside of autocast
    found = gradients(model)
    assert value.item() == pytest.approx(expected[0], rel=2e-2)
    whole, other = (torch.cat([g[n].flatten() for n in expected[1]]) for g in (expected[1], found))
    assert (other - whole).norm() < 0.1 * whole.norm()


class Rounded(TorchDispatchMode):
    """Counts how often weights of this shape are rounded to bf16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += output.shape == self.shape and output.dtype == torch.bfloat16
        return output


@pytest.mark.parametrize("outer", [False, True])
def test_weights_are_rounded_once_for_the_first_pass_and_again_for_each_graph(tmp_path, outer):
    model = bert(tmp_path)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # as accelerate does
    features = tokens(model, texts(16, 2))
    found = []
    for graphs, count in ((1, 1 + 1 + 7), (3, 1 + 3 + 5), (8, 8)):
        loss = ExactContrastiveLoss(model, mini_batch_size=4, retain_graphs=graphs)
        with Rounded(model[0].auto_model.encoder.layer[0].intermediate.dense.weight.shape) as rounded:
            with torch.autocast("cpu", torch.bfloat16, enabled=outer):
                value = loss(copy.deepcopy(features), None)
            value.backward()
        assert rounded.count == 2 * count  # layers
        found.append((value.item(), gradients(model)))
    check(found[0], found[2])
    check(found[1], found[2])


def test_attention_does_without_the_plans_of_cudnn(tmp_path):
    model = bert(tmp_path)
    seen: list[bool] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    computed(ExactContrastiveLoss(model), tokens(model, texts(4, 2)))
    assert seen == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def rank_of_both(rank: int, world_size: int, folder: Path, counts: list[int]) -> None:
    """DDP's mean over processes of unequal rows against one process with all of them; also in an accumulation."""
    model = bert(folder)
    columns = texts(sum(counts), 3)
    expected = plain(model, tokens(model, columns))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    first = sum(counts[:rank])
    mine = [column[first : first + counts[rank]] for column in columns]
    loss = ExactContrastiveLoss(ddp, mini_batch_size=2, retain_graphs=2)
    check(computed(loss, tokens(model, mine)), expected)
    if len(set(counts)) == 1:
        theirs = losses.MultipleNegativesRankingLoss(model, gather_across_devices=True)
        theirs.model = ddp
        check(computed(loss, tokens(model, mine)), (expected[0], computed(theirs, tokens(model, mine))[1]))
    with ddp.no_sync():
        loss(tokens(model, mine), None).backward()
        alone = loss(tokens(model, mine), None)
    alone.backward()  # DDP exchanges nothing outside either, since the forward was within
    loss(tokens(model, mine), None).backward()
    check((1.0, gradients(ddp)), (1.0, {n: 3 * g for n, g in expected[1].items()}))


@pytest.mark.parametrize("counts", [[6, 6], [3, 9], [4, 1, 7]])
def test_processes_share_one_batch(ranks, tmp_path, counts):
    ranks.run(rank_of_both, len(counts), saved_bert(tmp_path), counts)


def rank_of_frozen_last(rank: int, world_size: int, folder: Path) -> None:
    """The documents are encoded by a frozen route, so the last mini-batch trains nothing."""
    query, document = bert(folder), bert(folder)
    router = modules.Router.for_query_document(list(query.children()), list(document.children()))
    model = SentenceTransformer(modules=[router], device="cpu")
    document.requires_grad_(False)
    columns = texts(4 * world_size, 2)

    def features(rows: slice) -> Features:
        return [
            {**model.preprocess(c[rows], task=task), "task": task}
            for c, task in zip(columns, ("query", "document"), strict=True)
        ]

    expected = plain(model, features(slice(None)))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    loss = ExactContrastiveLoss(ddp, mini_batch_size=2)
    for _ in range(2):
        found = computed(loss, features(slice(4 * rank, 4 * rank + 4)))
        check(found, expected)
    static = DistributedDataParallel(model, static_graph=True)
    with pytest.raises(ValueError, match="leave ddp_static_graph off"):
        ExactContrastiveLoss(static)(features(slice(0, 4)), None)


def test_a_frozen_last_column_under_ddp(ranks, tmp_path):
    ranks.run(rank_of_frozen_last, 2, saved_bert(tmp_path))


def test_a_training_by_their_trainer_has_their_weights(tmp_path):
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    columns = texts(24, 2)
    data = datasets.Dataset.from_dict({"anchor": columns[0], "positive": columns[1]})
    found = []
    for make in (losses.MultipleNegativesRankingLoss, ExactContrastiveLoss):
        (folder := tmp_path / make.__name__).mkdir()
        model = bert(folder)
        options = {"output_dir": str(folder / "run"), "per_device_train_batch_size": 8, "max_steps": 5, "use_cpu": True}
        args = SentenceTransformerTrainingArguments(
            **options, report_to=[], save_strategy="no", logging_steps=1, learning_rate=1e-2, disable_tqdm=True
        )
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=make(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        losses_of_steps = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((losses_of_steps, torch.nn.utils.parameters_to_vector(model.parameters()).detach()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-5)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {"token_embeddings": features["input_ids"]}


class DeepSpeedEngine(nn.Module):
    """What DeepSpeed puts around a model has it as `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def around(name: str) -> Callable[[SentenceTransformer, Features], Any]:
    """A loss of theirs that reads several layers, around ours."""

    def call(model: SentenceTransformer, features: Features) -> Any:
        options = {"matryoshka_dims": [16, 8]} if name == "Matryoshka2dLoss" else {}
        with pytest.warns(UserWarning, match="not compatible with"):
            loss = getattr(losses, name)(model, ExactContrastiveLoss(model), **options)
        return loss(features, None)

    return call


def of_columns(change: Callable[[Features], Any]) -> Callable[[SentenceTransformer, Features], Any]:
    def call(model: SentenceTransformer, features: Features) -> Any:
        change(features)
        return ExactContrastiveLoss(model)(features, None)

    return call


def shorten(features: Features) -> None:
    features[1] = {k: v[:3] if isinstance(v, Tensor) else v for k, v in features[1].items()}


def empty_text(features: Features) -> None:
    features[1]["attention_mask"][2] = 0


BAD = {
    "another similarity": (lambda m, f: ExactContrastiveLoss(m, similarity_fct=util.euclidean_sim), "util.cos_sim or"),
    "direction": (lambda m, f: ExactContrastiveLoss(m, directions=("doc_to_doc",)), "directions must be"),
    "joint": (
        lambda m, f: ExactContrastiveLoss(m, directions=("query_to_doc", "doc_to_query")),
        "partition_mode='per_direction'",
    ),
    "size": (lambda m, f: ExactContrastiveLoss(m, mini_batch_size=0), "mini_batch_size must be at least 1, got 0"),
    "tokens": (lambda m, f: ExactContrastiveLoss(m, mini_batch_num_tokens=0), "mini_batch_num_tokens must be at least"),
    "graphs": (lambda m, f: ExactContrastiveLoss(m, retain_graphs="all"), "retain_graphs must be a number"),
    "scale": (lambda m, f: ExactContrastiveLoss(m, scale=0), "scale must be more than 0, got 0"),
    "one column": (of_columns(lambda f: f.pop()), "two columns at least, anchors and positives, got 1"),
    "lengths": (of_columns(shorten), r"same number of rows, got \[5, 3\]"),
    "an empty text": (of_columns(empty_text), "Row 2 of column 1 is a text without a token"),
    "no ids": (lambda m, f: ExactContrastiveLoss(m, labels_are_ids=True)(f, None), "one integer for each of 5 rows"),
    "DeepSpeed": (lambda m, f: ExactContrastiveLoss(DeepSpeedEngine(m))(f, None), "got a DeepSpeedEngine"),
    "layers": (around("AdaptiveLayerLoss"), "read all layers of one forward"),
    "layers and widths": (around("Matryoshka2dLoss"), "read all layers of one forward"),
    "no embedding": (
        lambda m, f: ExactContrastiveLoss(nn.Sequential(Silent()))(f, None),
        "no 'sentence_embedding', but token_embeddings",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_sentence(tmp_path, name):
    call, message = BAD[name]
    model = bert(tmp_path)
    with pytest.raises(ValueError, match=message):
        call(model, tokens(model, texts(5, 2)))


def rank_of_fsdp(rank: int, world_size: int, folder: Path) -> None:
    model = bert(folder)
    features = tokens(model, texts(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    with pytest.raises(ValueError, match="FSDP2 needs InfCLTrainer"):
        ExactContrastiveLoss(model)(features, None)


def test_a_sharded_model_gets_a_sentence(ranks, tmp_path):
    ranks.run(rank_of_fsdp, 2, saved_bert(tmp_path))


def test_a_batch_of_one_has_a_loss_of_nothing(tmp_path):
    model = bert(tmp_path)
    value = ExactContrastiveLoss(model)(tokens(model, texts(1, 2)), None)
    value.backward()
    assert value.item() == 0


def test_the_guide_s_training(tmp_path):
    import datasets

    saved_bert(tmp_path / "model")
    SentenceTransformer(
        modules=[modules.Transformer(str(tmp_path / "model"), max_seq_length=32), modules.Pooling(16)], device="cpu"
    ).save(str(tmp_path / "encoder"))
    columns = texts(8, 2)
    changes = {
        "sentence-transformers/all-MiniLM-L6-v2": str(tmp_path / "encoder"),
        '"outputs/embedder", per_device_train_batch_size=4096': (
            f"{str(tmp_path / 'out')!r}, max_steps=2, use_cpu=True, report_to=[]"
        ),
    }
    names = {"dataset": datasets.Dataset.from_dict({"anchor": columns[0], "positive": columns[1]})}
    exec(replaced(block_of("hf_infcl/step/README.md", "ExactContrastiveLoss("), changes), names)
    assert names["trainer"].state.global_step == 2


def test_the_script_measures_before_and_after(tmp_path, monkeypatch, capsys):
    import datasets

    saved_bert(tmp_path / "model")
    SentenceTransformer(
        modules=[modules.Transformer(str(tmp_path / "model"), max_seq_length=32), modules.Pooling(16)], device="cpu"
    ).save(str(tmp_path / "encoder"))
    names = [" ".join(text) for text in itertools.permutations("abcdef", 3)]
    rows = [[name, f"{name} x", name[::-1] + " y"] for name in names]
    datasets.Dataset.from_dict({"caption": rows}).to_parquet(tmp_path / "train.parquet")
    words = ["fine_tune_text.py", "--model", tmp_path / "encoder", "--use_cpu", "--pairs", tmp_path / "train.parquet"]
    words += ["--output_dir", tmp_path / "out", "--batch_size", 32, "--max_steps", 8, "--learning_rate", "1e-2"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    runpy.run_path(str(SCRIPTS / "fine_tune_text.py"), run_name="__main__")
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r"mrr@10: ([\d.]+) before, ([\d.]+) after", printed).groups())
    assert after > before
