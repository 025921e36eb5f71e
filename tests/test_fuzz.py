"""A small number of random inputs; tests/soak.py draws 10,000 cases of each kind."""

import ast
import contextlib
import functools
import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import extended, fuzz, models
from helpers.guides import blocks
from helpers.trainers import trainer_for
from helpers.usage import Usage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_infcl.card import Evaluation, Source
from hf_infcl.card.cards import model_card
from hf_infcl.card.facts import TrainingFacts
from hf_infcl.cli.commands import PARSERS
from hf_infcl.loss import contrastive, objectives, reference

# ---- The loss ----


def test_any_loss_is_as_exact_as_plain_torch():
    found = fuzz.rank_cases(0, 1, "cpu", range(200))
    assert found.cases == 200
    assert not found.failures, found.failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_loss_of_several_processes_is_as_exact_as_plain_torch(ranks, world_size):
    for found in ranks.run(fuzz.rank_cases, world_size, "cpu", range(40), always_ring=True):
        assert not found.failures, found.failures


def test_a_slightly_wrong_gradient_is_found(monkeypatch):
    right = contrastive._scaled  # an error within the loss, as the fuzzing has to find it
    monkeypatch.setattr(contrastive, "_scaled", lambda products, factor, *args: right(products, 1.001 * factor, *args))
    failures = fuzz.rank_cases(0, 1, "cpu", range(40)).failures
    assert len(failures) > 10
    assert not [text for text in failures if not any(f"name='{name}'" in text for name in fuzz.EMBEDDINGS)]


def test_a_slightly_wrong_share_of_several_positives_is_found(monkeypatch):
    right = objectives._cross_entropies  # as above

    def wrong(*args: Any) -> Any:
        loss, relative, share = right(*args)
        return loss, relative, 1.001 * share

    monkeypatch.setattr(objectives, "_cross_entropies", wrong)
    failures = fuzz.rank_cases(0, 1, "cpu", range(100)).failures
    assert len(failures) > 10
    assert not [text for text in failures if "objective='sigmoid'" in text or "belonging=None" in text]


def test_the_reference_of_float64_is_more_exact():
    """Whatever the order in which a processor adds the three products of a cosine, the reference has all digits."""
    rows = torch.tensor([[2.0**30, 1.0, -(2.0**30)], [2.0**30, 1.0, 2.0**30], [0.0, 0.0, 0.0]]).double()
    usual = []
    for order in itertools.permutations(range(3)):
        x, near, far = rows[:, order].split(1)
        arguments = {"image_embeds": x, "text_embeds": near, "negative_texts": far}  # cosines 1 and 0
        exact, gradients = extended.loss_and_gradients(arguments, 1.0, 0.0, "softmax")
        assert float(exact) == pytest.approx(math.log1p(math.exp(-1)) / 2, rel=1e-15)
        assert float(gradients["logit_scale"]) == pytest.approx(-1 / (1 + math.e) / 2, rel=1e-15)
        usual.append(reference.contrastive_loss(**arguments, logit_scale=1.0).item())
    assert math.log(2) / 2 in usual, "float64 loses the 1 in no order"


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 2.0**-60, reason="numpy's longdouble is float64")
@pytest.mark.parametrize("spread", [0, 40])
def test_a_product_of_matrices_has_all_digits(spread):
    a, b = (torch.randn(3, 100, generator=torch.Generator().manual_seed(seed)).double() for seed in range(2))
    a, b = (t.div(3) * torch.logspace(0, spread, 100, base=0.5, dtype=torch.float64) for t in (a, b))
    found = extended.product(a.numpy().astype(np.longdouble), b.numpy().astype(np.longdouble), a.device)
    for i, j in itertools.product(range(3), range(3)):
        terms = [Fraction(p) * Fraction(q) for p, q in zip(a[i].tolist(), b[j].tolist(), strict=True)]
        high, low = (part.item() for part in extended.parts(found[i, j], a.device))
        assert abs(Fraction(high) + Fraction(low) - sum(terms)) <= Fraction(2) ** -63 * sum(map(abs, terms))


def test_the_reference_of_float64_is_the_same_loss():
    seen = set()
    for seed in range(250):
        case = fuzz.Case.draw(seed, 1, "cpu")
        if case.dtype == "float64":
            seen.add((case.objective, case.pair_ids is None, case.belonging is None, case.negative_texts is None))
            (truth, exact), (plain, usual) = (
                fuzz.exact_results(case, case.arguments()),
                fuzz.plain_results(case, case.arguments(), torch.float64),
            )
            assert truth[0].item() == pytest.approx(plain.item(), rel=1e-9, abs=1e-12)
            for name, gradient in usual.items():
                torch.testing.assert_close(exact[name][0], gradient, rtol=1e-8, atol=1e-9, msg=f"{name} of {case}")
    assert len(seen) == 12


# ---- The command line ----

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
WORD = TEXT.filter(lambda text: not text.startswith("-"))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "run_name": TEXT,
    "use_cpu": st.booleans(),
    "max_steps": st.integers(-(10**12), 10**12),
    "learning_rate": st.floats(allow_nan=False),
    "templates": st.lists(WORD, min_size=1, max_size=3),
    "freeze": st.sampled_from(["image", "text"]),
}


parser = functools.cache(PARSERS["train"])


@settings(deadline=None)
@given(values=st.fixed_dictionaries({}, optional=VALUES), order=st.randoms(use_true_random=False))
def test_any_value_comes_out_of_the_command_line_as_it_went_in(values, order):
    groups = [["--model", "m"], ["--dataset", "d"]]
    for name, value in values.items():
        if isinstance(value, list):
            groups.append([f"--{name}", *value])
        else:  # after "=" a value may begin with a dash
            groups.append([f"--{name}={value}"])
    order.shuffle(groups)
    namespace = parser().read([word for group in groups for word in group])
    assert parser().given == {"model", "dataset", *values}
    for name, value in values.items():
        assert getattr(namespace, name) == value
        assert type(getattr(namespace, name)) is type(value)


@settings(deadline=None)
@given(
    words=st.lists(
        st.sampled_from(
            ["--model", "--dataset", "--seed", "--use_cpu", "--no_use_cpu", "--optim=", "--", "-h", "a.yaml"]
        )
        | TEXT
        | TEXT.map("--{}".format)
        | st.text("-= \n\0x0~{}[]", max_size=8),
        max_size=8,
    )
)
def test_no_command_line_leads_to_a_traceback(words):
    with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):
        parser().read(words)


# ---- The model card ----

NUMBER = st.floats(-1e9, 1e9)
# A card names a dataset by its id on the Hub, or by any text that is no URL.
NAMED = st.tuples(st.sampled_from(["me/pairs", "a-b.c_d", "x"]), st.just(True)) | st.tuples(
    TEXT.filter(lambda text: "://" not in text), st.just(False)
)
SOURCE = st.builds(
    *(lambda named, **facts: Source(*named, **facts), NAMED),
    split=TEXT,
    license=st.none() | TEXT,
    weight=st.none() | st.floats(0, 1),
)
EVALUATION = st.builds(
    *(lambda named, *facts, **more: Evaluation(*named, *facts, **more), NAMED, TEXT, st.integers(0, 10**9), TEXT),
    metrics=st.dictionaries(
        st.sampled_from(["acc1", "acc5", "mean_per_class_recall", "loss", "image_retrieval_recall@1", "runtime"])
        | TEXT,
        NUMBER | st.just(float("nan")),
        max_size=3,
    ),
    templates=st.lists(TEXT, max_size=2),
    class_names=st.lists(TEXT, max_size=3),
)
COUNT = st.integers(1, 10**6)
FACTS = st.builds(
    TrainingFacts,
    **dict.fromkeys(("name", "location", "start", "device"), TEXT),
    model_class=st.just("CLIPModel"),
    objective=st.sampled_from(["softmax", "sigmoid"]),
    strategy=st.sampled_from(["ring", "disco"]),
    **dict.fromkeys(("start_on_hub", "adapter", "measured_during_training", "best"), st.booleans()),
    **dict.fromkeys(("per_device_batch_size", "accumulation_steps", "processes", "steps"), COUNT),
    **dict.fromkeys(("pairs", "peak_memory"), st.none() | COUNT),
    pair_id_column=st.none() | TEXT,
    frozen=st.sampled_from([None, "image", "text"]),
    seconds=st.floats(0, 1e9),
    skipped=st.integers(0, 10**6),
    sources=st.lists(SOURCE, min_size=1, max_size=2),
    **dict.fromkeys(("versions", "settings"), st.dictionaries(TEXT, TEXT, max_size=2)),
    evaluations=st.lists(EVALUATION, max_size=2),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(facts=FACTS)
def test_any_facts_make_a_card_that_can_be_read(tmp_path_factory, facts):
    content = model_card(facts).content
    header, _, text = content.removeprefix("---\n").partition("\n---\n")
    metadata = yaml.safe_load(header)
    if facts.start.isprintable():  # as every id on the Hub is; YAML treats U+0085 as a line break
        assert metadata.get("base_model") == (facts.start if facts.start_on_hub else None)
    for snippet in blocks(text):
        ast.parse(snippet)
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.split(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1, block
    if all(math.isfinite(value) for e in facts.evaluations for value in e.metrics.values()):  # JSON has no NaN
        folder = tmp_path_factory.getbasetemp()
        facts.save(folder)
        assert TrainingFacts.load(folder) == facts


# ---- Many steps ----


def test_training_holds_on_to_nothing(tmp_path):
    seen = Usage(40, notes=8)
    often = {f"{what}_steps": 10 for what in ("eval", "save", "logging")}
    options = {"eval_strategy": "steps", "save_strategy": "steps", "save_total_limit": 1, **often}
    trainer_for(
        *(tmp_path, None, models.Pairs(64)), callbacks=[seen], max_steps=40, eval_dataset=models.Pairs(8), **options
    ).train()
    assert len(seen.seen) == 8
    assert seen.grown().keys() <= {"resident MiB"}, "which says nothing in so few steps"


def test_what_is_held_on_to_is_found(tmp_path):
    seen, kept = Usage(8, notes=8), []
    trainer = trainer_for(tmp_path, callbacks=[seen], max_steps=8)
    trainer.model.register_forward_hook(lambda model, inputs, outputs: kept.append(outputs.image_embeds.detach()))
    trainer.train()
    assert "tensors" in seen.grown()
