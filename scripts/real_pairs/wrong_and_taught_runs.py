"""The runs of wrong_and_taught.py, by the parts that they are started in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_infcl.windows.terms import SIDES

SAMPLES, BATCH, MICRO_BATCH = 589_824, 1024, 1024
TUNING_SAMPLES, TUNING_BATCH = 65_536, 512
RATES = {"muon": 4e-3, "adamw": 5e-4}
PLAIN: dict[str, Any] = {
    **{"size": "small", "optimizer": "muon", "times": 1, "wrong": 0.0, "oracle": False, "cleaned": 0.0},
    **{"trained_on": "all", "teacher": "", "taught_by": "", "weight": 0.0, "side": "both", "options": {}},
    **{"method": "InfCLTrainer", "batch": BATCH, "pair_ids": False, "captions": 1},
}
NOISY = {"leave_out": "noisy"}
IN_BF16 = {"bf16": True, "bf16_activations": True}  # "bf16" for a CPU, which trains in fp32 otherwise


def stored_by(teacher: str, **more: Any) -> dict[str, Any]:
    return {"teacher": "stored", "taught_by": teacher, "weight": 1.0, **more}


def similar_to(teacher: str, share: float) -> dict[str, Any]:
    taught = stored_by(teacher, weight=share, options={"contrastive_weight": 1 - share})
    return {**taught, "teacher": "similarities"}


def of_teachers() -> dict[str, list[dict[str, Any]]]:
    """The parts about teachers that have more seeds, other widths, similarities, and pairs that no teacher has seen."""
    adamw, tiny, same, without = {"optimizer": "adamw"}, {"size": "tiny"}, "small 4", "small 4 without twemoji"
    seeds, prefixes = (0, 1, 2), {"matryoshka_dims": [32, 64, 128]}
    unseen = {"trained_on": "twemoji"}
    tuned = {"trained_on": "clip art"}
    return {
        "taught, more seeds": [
            *({"seed": 2, **size} for size in ({}, tiny)),
            *({"seed": s, **stored_by(same), "side": side} for s in (0, 1, 2) for side in SIDES),
            *({"seed": s, **stored_by(same, weight=w)} for s in (1, 2) for w in (0.3, 4.0)),
            *({"seed": s, **stored_by(same), "options": {"contrastive_weight": 0.0}} for s in (1, 2)),
            *({"seed": s, **stored_by(same), "options": prefixes} for s in (1, 2)),
            *({"seed": s, "options": prefixes} for s in (1, 2)),
            *({"seed": s, **adamw} for s in (1, 2)),
            {"seed": 2, **stored_by(same), **adamw},
            *({"seed": s, "wrong": 0.5, **stored_by(same), "options": NOISY} for s in (1, 2)),
        ],
        "taught by large, more seeds": [
            {"seed": 2, **stored_by("large 4")},
            *({"seed": s, **stored_by("large 4", weight=4.0)} for s in (1, 2)),
            {"seed": 2, **stored_by("large 4"), **tiny},
        ],
        "taught through a map": [{"seed": s, **stored_by(same), "teacher": "wider"} for s in seeds],
        "taught by similarities": [
            *({"seed": s, **similar_to(same, share)} for s in seeds for share in (0.5, 1.0)),
            *({"seed": 0, **similar_to("large 4", share)} for share in (0.5, 1.0)),
            {"seed": 0, **similar_to(same, 1.0), **tiny},
        ],
        "teacher without a vendor": [
            {"seed": 100, "times": 4, "rate": 2e-3, "trained_on": "all but twemoji", "save": without}
        ],
        # Students of pairs that the teacher has not seen, and of all pairs, of which it has seen some.
        "taught by one without a vendor": [
            *({"seed": s, **unseen, **taught} for s in seeds for taught in (stored_by(without), {})),
            *({"seed": s, **unseen, **similar_to(without, share)} for s in seeds for share in (0.5, 1.0)),
            *({"seed": s, **taught} for s in (0, 1) for taught in (stored_by(without), similar_to(without, 0.5))),
            {"seed": 0, **similar_to(without, 1.0)},
        ],
        "tuned, more seeds": [
            {"seed": 2, **tuned, **stored_by(same)},
            *({"seed": s, **tuned, "options": {"keep_features": 1.0}} for s in (0, 2)),
            *({"seed": s, **tuned} for s in (1, 2)),
        ],
    }


def with_icons() -> dict[str, list[dict[str, Any]]]:
    """The parts about icons, the most important first; the runs of one part take about as long."""
    muon = {256: 2e-3, 1024: 2e-3, 4096: 4e-3, 16_384: 4e-3}
    adamw = dict.fromkeys(muon, 5e-4)

    def of(optimizer: str, batch: int, seed: int, rate: float = 0.0, **more: Any) -> dict[str, Any]:
        rate = rate or (muon if optimizer == "muon" else adamw)[batch]
        return {"optimizer": optimizer, "batch": batch, "seed": seed, "rate": rate, "times": 4, **more}

    # In turn, so that on four GPUs the runs of 256 pairs, which are the slowest, are on different ones.
    orders = {0: (256, 16_384, 4096, 1024), 1: (16_384, 256, 1024, 4096), 2: (256, 16_384, 4096, 1024)}
    both, seeds = ("muon", "adamw"), (0, 1, 2)
    batches = {seed: [of(o, batch, seed) for batch in order for o in both] for seed, order in orders.items()}
    taught = stored_by("icons 4")
    losses_over_256, no_icons = {"method": "Trainer"}, {"trained_on": "all but icons"}
    return {
        "icons": [*batches[0], *batches[1]],
        "icons or not": [
            *(of("muon", 1024, s, **no_icons) for s in (0, 1)),
            *(of("muon", 4096, s, **losses_over_256) for s in seeds),
            *(of(o, 4096, 0, **no_icons) for o in both),
            of("adamw", 4096, 0, **losses_over_256),
            of("adamw", 1024, 0, **no_icons),
        ],
        "icons wrong": [
            of("muon", 1024, s, wrong=0.2, **more) for s in seeds for more in ({"options": NOISY}, {}, {"oracle": True})
        ],
        "icons taught": [
            of("muon", 1024, 100, save="icons 4"),
            *({"seed": s, **on, **more} for s in seeds for on in (no_icons, {}) for more in (taught, {})),
        ],
        "icons third seed": [job for job in batches[2] if job["batch"] in (1024, 4096)],
        "icons third seed, 256 and 16,384": [job for job in batches[2] if job["batch"] in (256, 16_384)],
        "icons rates of 256": [
            *(of("muon", 256, 0, rate) for rate in (1e-3, 4e-3)),
            *(of("adamw", 256, 0, rate) for rate in (2.5e-4, 1e-3)),
        ],
        "icons rates": [
            *(of("muon", batch, 0, 2 * muon[batch]) for batch in (16_384, 4096)),
            *(of("muon", 1024, s, 2 * muon[1024]) for s in seeds),
            *(of("adamw", batch, 0, 2 * adamw[batch]) for batch in (16_384, 4096)),
        ],
        "icons pair_ids": [of("muon", batch, 0, pair_ids=True) for batch in (16_384, 4096)],
        "icons captions": [of("muon", 1024, 0, captions=3)],
        "icons 9.4 million": [
            *(of(o, batch, 0, times=16) for o in both for batch in (1024, 4096, 16_384)),
            *(of("muon", 4096, s, times=16) for s in (1, 2)),
        ],
    }


def make_jobs(names: Sequence[str]) -> list[dict[str, Any]]:
    """The runs of the chosen parts. Those that save a model, on which others wait, begin first."""
    adamw, tiny, tuned = {"optimizer": "adamw"}, {"size": "tiny"}, {"trained_on": "clip art"}
    same = "small 4"
    parts: dict[str, list[dict[str, Any]]] = {
        "teachers": [
            {"seed": 100, "times": 4, "rate": 2e-3, "save": same},
            {"seed": 100, "size": "large", "times": 4, "rate": 2e-3, "save": "large 4"},
        ],
        "base": [{"seed": 0, "save": "emoji", "trained_on": "emoji"}],
        "wrong": [
            *({"wrong": w, "seed": s, "options": NOISY} for s in (0, 1, 2) for w in (0.2, 0.5, 0.1, 0.0)),
            *({"wrong": w, "seed": s} for s in (1, 2, 0) for w in (0.2, 0.5, 0.1, 0.0)),
            *({"wrong": w, "seed": s, "oracle": True} for s in (1, 2, 0) for w in (0.2, 0.5, 0.1)),
            *({"wrong": w, "seed": s, "cleaned": p} for s in (1, 2) for w in (0.2, 0.5) for p in (0.5, 0.9)),
            *({"wrong": 0.0, "seed": 1, "cleaned": p} for p in (0.5, 0.9)),
        ],
        "titles": [
            {"wrong": "titles", "seed": s, **more}
            for s in (0, 1, 2)
            for more in ({"options": NOISY}, {}, {"oracle": True})
        ],
        # As much work as 576 whole steps: a step costs a forward of its pairs and three more of those that take part.
        # Epochs pass over three quarters of what is left out, and windows are full of other rows, which saves nothing.
        "wrong, as much work": [
            {"wrong": w, "seed": s, "options": NOISY, "times": times}
            for s in (0, 1, 2)
            for w, times in ((0.2, 1.075), (0.5, 1.205))
        ],
        "wrong adamw": [
            *({"wrong": w, "seed": s, "options": NOISY, **adamw} for s in (0, 1, 2) for w in (0.2, 0.5, 0.0, 0.1)),
            *({"wrong": w, "seed": s, **adamw} for s in (0, 1, 2) for w in (0.2, 0.5, 0.0, 0.1)),
            *({"wrong": w, "seed": s, "oracle": True, **adamw} for s in (0, 1, 2) for w in (0.2, 0.5)),
        ],
        "taught": [
            *({"seed": s, **tiny} for s in (0, 1)),
            *({"seed": s, **stored_by(same)} for s in (0, 1, 2)),
            *({"seed": s, **stored_by(same), **tiny} for s in (0, 1, 2)),
            *({"seed": s, **stored_by(same, weight=w)} for s in (0, 1) for w in (4.0, 0.3)),
            *({"seed": 0, **stored_by(same), "side": side} for side in ("image", "text")),
            *({"seed": s, **stored_by(same), **adamw} for s in (0, 1)),
            {"seed": 0, **stored_by(same), "options": {"contrastive_weight": 0.0}},
            {"seed": 0, **stored_by(same), "options": {"matryoshka_dims": [32, 64, 128]}},
            *({"seed": 0, "wrong": 0.5, **stored_by(same), "options": o} for o in ({}, NOISY)),
        ],
        "taught by large": [
            {"seed": 0, "times": 4, **stored_by(same)},
            *({"seed": s, **stored_by("large 4", weight=w)} for s in (0, 1) for w in (1.0, 4.0)),
            *({"seed": s, **stored_by("large 4"), **tiny} for s in (0, 1)),
        ],
        "tuned": [
            *({"wrong": w, "seed": s, **tuned} for s in (0, 1, 2) for w in (0.0, 0.2, 0.5)),
            *({"wrong": w, "seed": s, **tuned, "options": NOISY} for s in (0, 1, 2) for w in (0.0, 0.2, 0.5)),
            *({"wrong": w, "seed": s, **tuned, "oracle": True} for s in (0, 1, 2) for w in (0.2, 0.5)),
            *({"seed": s, **tuned, **stored_by(same)} for s in (0, 1)),
            *({"seed": s, **tuned, "options": {"keep_features": 1.0}} for s in (0, 1)),
        ],
    }
    parts["tuned, scored by the start"] = [
        *({"wrong": w, "seed": s, **tuned, "cleaned": 0.5} for s in (0, 1, 2) for w in (0.2, 0.5, 0.0)),
    ]
    parts["bf16 activations"] = [
        *({"seed": s, "options": options} for s in (0, 1, 2) for options in ({}, IN_BF16)),
        *({"seed": 0, "options": options, **adamw} for options in ({}, IN_BF16)),
    ]
    parts |= of_teachers() | with_icons()
    jobs = [{**PLAIN, **job} for name in names for job in parts[name]]
    return sorted(jobs, key=lambda job: "save" not in job)


def needed_by(job: Mapping[str, Any]) -> list[str]:
    """The files of other runs without which a run cannot begin."""
    averages, teacher = f"averages {job['wrong']}.pt", job["taught_by"]
    needed = {
        averages: job["cleaned"] and job["trained_on"] != "clip art",
        f"stored {teacher}.pt": teacher,
        f"model {teacher}.pt": job["teacher"] == "similarities",
        "model emoji.pt": job["trained_on"] == "clip art",
    }
    return [name for name, needs in needed.items() if needs]
