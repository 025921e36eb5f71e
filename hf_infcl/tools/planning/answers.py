"""What to write for what one has: the table of scripts/ANSWERS.md, of which `infcl plan` and `check` tell one line."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

from ...options.batch_options import DIVISION
from ...options.declaring import spelled
from ...options.files import RECIPES, options_in

PAGE = "scripts/ANSWERS.md"
FEW, MANY = 10_000, 1_000_000  # pairs, between which the answer for 50,000 holds: a hundred steps or more
FINE_TUNING = 1e-4  # the highest usual learning rate of a checkpoint's weights, but for adapters and a locked tower
# Options of a training that begins with weights which know something.
OF_CHECKPOINTS = tuple(
    """
    lora_rank freeze keep_features keep_weights replay_dataset guard_dataset guard_benchmark average_with_start
    """.split()
)
SMALL_MEMORY = 24  # GiB of a GPU

LEAST = 8  # pairs, of a quarter of which a batch has negatives
SMALL_BATCH = 64  # the smallest that is advised in order to have more steps
TOO_FEW_STEPS = 100  # for a schedule; fine-tuning 128 steps of 512 pairs has learned (scripts/real_pairs)
# From random weights with Muon, the batch that leaves 2,304 steps found the most of those that were measured, with
# 17,168 pairs and with 150,101; fewer than a thousand cost much. Smaller and larger batches, or more epochs, were not.
LEAST_STEPS, BEST_STEPS = 1000, 2000
SMALL_MEASURED, LARGE_MEASURED, MOST_EPOCHS = 256, 4096, 137
# Options that say what a user has. Where he has written them, an answer has his values.
OF_USER = tuple(
    """
    samples_per_epoch captions_per_image replay_dataset guard_dataset teacher_embeddings negative_caption_column
    """.split()
)
OF_BATCH = {"global_batch", "global_batch_size"}  # of `infcl plan`, and of a training

# The metrics of the figures of an answer, for commands, which show no page.
RECALL = "recall@1 in per cent"
OLD_AND_NEW = "in per cent: recall@1 on what the checkpoint knew (old), recall@5 on what it is trained on (new)"
_TABLES = "real_pairs/results/TABLES.md"
_STEP = "benchmarks/results/README.md#a-training-step"


class Answer(NamedTuple):
    """A row of the table; its links are relative to the page, and lead to the table with the figures."""

    have: str  # what the user has
    write: str  # words of `infcl train`, or of what starts it
    gain: str  # what was measured
    price: str
    figures: str = ""  # what the figures of the gain are, if they are results of models


ANSWERS = {
    "few pairs": Answer(
        "a checkpoint and some 500 pairs",
        "--recipe finetune_alone --global_batch_size 64 --num_train_epochs 30 --early_stopping_patience 3",
        "with 5,292 pairs, not measured with fewer: "
        f"[old 37.0 → 31.7, new 7.8 → 16.4]({_TABLES}#averages-with-the-start)",
        f"new pairs are learned less well: [full fine-tuning 20.1, but old 9.1]({_TABLES}#averages-with-the-start)",
        OLD_AND_NEW,
    ),
    "pairs": Answer(
        "a checkpoint and some 50,000 pairs, no old ones",
        "--recipe finetune_alone --global_batch_size 512",
        f"[old 37.0 → 31.7, full fine-tuning → 9.1]({_TABLES}#averages-with-the-start)",
        f"[new 7.8 → 16.4, full fine-tuning → 20.1]({_TABLES}#averages-with-the-start)",
        OLD_AND_NEW,
    ),
    "old pairs": Answer(
        "a checkpoint, new pairs, and old ones that it knows, or similar ones",
        "--recipe finetune_keep --global_batch_size 1024 --replay_dataset old/pairs --guard_dataset old/pairs",
        f"[old 37.0 → 35.2, new 7.8 → 19.8]({_TABLES}#averages-with-the-start)",
        "an epoch of the new pairs takes twice the steps",
        OLD_AND_NEW,
    ),
    "many pairs": Answer(
        "a checkpoint and some 5 million pairs",
        "--recipe finetune_clip --streaming --samples_per_epoch 5000000 --torch_compile",
        f"[2,636 images a second, compiled, instead of 2,480]({_STEP}); recalls were not measured",
        "old knowledge goes: use finetune_keep if you have old pairs",
    ),
    "random weights": Answer(
        "random weights and up to ten million pairs",
        "--optimizer muon --learning_rate 5e-4 --augmentation crop --global_batch_size 1024",
        f"[29.1 with AdamW, 48.7 with Muon]({_TABLES}#adamw-and-muon) on the same samples",
        "[9.3 ms per step instead of 2.4](benchmarks/results/README.md#the-optimizers-step) for a ViT-B/16; take the "
        "batch that leaves two thousand steps: [2,304 of 1,024 pairs found 43.1, 576 of 4,096 34.8]"
        "(real_pairs/README.md#with-nine-times-the-pairs)",
        RECALL,
    ),
    "more": Answer(
        "random weights and more pairs",
        "--recipe from_scratch",
        "[with Muon 2,048 pairs per step find 55.6, 256 find 55.8; with AdamW 38.7 and 45.7]"
        f"({_TABLES}#adamw-and-muon) on the same samples, "
        "[in 65 s instead of 355](real_pairs/README.md#how-large-a-batch)",
        "a thousand steps or more, two thousand with AdamW; so many pairs were not measured",
        RECALL,
    ),
    "noisy": Answer(
        "captions of which some are wrong",
        "--leave_out noisy",
        "from random weights, a fifth of them wrong: [with Muon 33.5 → 41.1, with AdamW 15.6 → 18.3; in a fine-tuning "
        f"by Muon new 20.2 → 21.8]({_TABLES}#wrong-captions-and-teachers)",
        "ten epochs or more; rare right pairs may be left out; titles that many files share are not found: "
        f"[44.5 → 44.2]({_TABLES}#wrong-captions-and-teachers)",
        f"{RECALL}; new: recall@5 on what a checkpoint is trained on",
    ),
    "teacher": Answer(
        "a large model that knows the pairs, and a small one to train",
        "--recipe distill --teacher_embeddings outputs/teacher",
        f"[from random weights with Muon 45.6 → 53.3, for a third of the size 38.7 → 48.3; with AdamW 22.8 → 35.5]"
        f"({_TABLES}#wrong-captions-and-teachers)",
        "one `infcl embed` over the pairs; in a fine-tuning by Muon old knowledge is not kept: "
        f"[23.3 → 20.3]({_TABLES}#wrong-captions-and-teachers)",
        RECALL,
    ),
    "several captions": Answer(
        "several captions per image",
        "--captions_per_image 3",
        f"from random weights [with AdamW 29.1 → 34.5]({_TABLES}#several-captions), at the rate of one caption, [with "
        f"Muon and icons 43.1 → 47.4]({_TABLES}#icons), one seed",
        "memory and time of so many texts per image; no gain on new concepts",
        RECALL,
    ),
    "swapped words": Answer(
        "captions that one word makes wrong",
        "--negative_caption_column wrong",
        f"[relations told apart: 80.7 → 96.3]({_TABLES}#hard-negatives) from random weights with AdamW; not measured "
        "with Muon",
        "one more text per image",
        "in per cent",
    ),
    "languages": Answer(
        "captions in many languages",
        "--recipe finetune_siglip2 --eval_benchmark xm3600",
        "not measured",
        "texts of 64 tokens each",
    ),
    "frozen images": Answer(
        "images that the checkpoint tells apart, and new words for them",
        "--recipe lit",
        f"[old 18.8, new 19.0; with both towers trained 8.9 and 20.3]({_TABLES}#fine-tuning)",
        "the image tower learns nothing; a cache of 4 bytes × its width per image",
        OLD_AND_NEW,
    ),
    "small GPU": Answer(
        "a small GPU",
        "--global_batch_size 1024 --offload_inputs",
        f"[4,096 pairs per step in 3.0 GiB, 256 in 2.7]({_TABLES}#cost)",
        f"[5,116 pairs a second instead of 5,580]({_TABLES}#cost); `--patch_dropout 0.5` takes "
        "[16.2 GiB instead of 23.9](benchmarks/results/README.md#fewer-patches-and-texts-encoded-at-once) and "
        "[4 points](real_pairs/README.md#fewer-tokens)",
    ),
    "many GPUs": Answer(
        "several GPUs",
        "torchrun --nproc_per_node 8 -m hf_infcl ...",
        "[two H200s keep 98.9% of the rate without communication, eight 93.5%]"
        "(benchmarks/results/README.md#the-loss-on-several-gpus), in the loss of 65,536 pairs each",
        "models that do not fit on one GPU need a file of `scripts/configs`",
    ),
    "batch": Answer(
        "`Trainer` or a loop with accumulation",
        "--global_batch_size 1024",
        "one loss over 1,024 pairs instead of four over 256, from random weights: "
        f"[with AdamW 20.2 → 22.9, with Muon 40.1 → 44.6]({_TABLES}#the-same-number-of-steps)",
        "another forward, or memory: with short texts [2,480 images a second in 76.2 GiB, `Trainer` 1,492 in 26.1]"
        f"({_STEP})",
        RECALL,
    ),
}


def batch_of_enough_steps(samples: float, steps: int = TOO_FEW_STEPS) -> int:
    """The largest power of two that divides so many samples, those of all epochs, into ``steps`` or more."""
    return 1 << (max(1, int(samples / steps)).bit_length() - 1)


def table() -> str:
    """The table of the page."""
    rows = [f"| {one.have} | `{one.write}` | {one.gain} | {one.price} |" for one in ANSWERS.values()]
    return "\n".join(["| I have | write | measured gain | price |", "|---|---|---|---|", *rows])


def choose_answer(options: Mapping[str, Any], *, pairs: int | None, texts: float = 1, foreign: bool = False) -> Answer:
    """The answer for a training.

    Args:
        options: of the command, as far as they are known.
        pairs: of its training set, if that is known.
        texts: captions per image.
        foreign: whether the tokenizer does not know the scripts of many captions.
    """
    pairs, random = pairs or 0, _is_random(options)
    reasons = {
        "languages": foreign,
        "teacher": options.get("teacher") or options.get("teacher_embeddings"),
        "noisy": options.get("leave_out") == "noisy",
        "old pairs": options.get("replay_dataset"),
        "frozen images": options.get("freeze") == "image" and not options.get("keep_features"),
        "swapped words": options.get("negative_caption_column"),
        "several captions": max(texts, options.get("captions_per_image") or 1) > 1.5,
        "more": random and pairs > 10 * MANY,
        "random weights": random,
        "many GPUs": (options.get("gpus") or 1) > 1,
        "small GPU": (options.get("gpu_memory") or SMALL_MEMORY) < SMALL_MEMORY,
        "many pairs": pairs >= MANY,
        "pairs": pairs >= FEW,
        "few pairs": pairs > 0,
    }
    return ANSWERS[next((name for name, holds in reasons.items() if holds), "batch")]


def _is_random(options: Mapping[str, Any]) -> bool:
    """Whether a training probably begins with random weights."""
    has_high_rate = (options.get("learning_rate") or 0.0) > FINE_TUNING
    is_from_scratch = options.get("optimizer") == "muon" or has_high_rate or _is_untrained(options.get("model"))
    return is_from_scratch and not any(map(options.get, OF_CHECKPOINTS))


def _is_untrained(model: str | None) -> bool:
    """Whether a local folder holds random weights: their temperature is the one that they begin with."""
    path, weights = Path(model or "", "config.json"), Path(model or "", "model.safetensors")
    if not (path.is_file() and weights.is_file()):
        return False
    from ...encoders.dual_encoder import MODEL_TYPES  # slow, as is torch

    config = json.loads(path.read_text(encoding="utf-8"))
    kind = MODEL_TYPES.get(config.get("model_type"))
    with safetensors.safe_open(weights, "pt") as file:
        if kind is None or kind.temperature not in file.keys():  # noqa: SIM118
            return False
        return kind.looks_random(file.get_tensor(kind.temperature).item(), config)


def answer_line(
    answer: Answer,
    options: Mapping[str, object] | None = None,
    decided: Collection[str] = (),
    *,
    pairs: int | None = None,
    at_least: bool = False,
    texts: float = 3,
) -> str:
    """The answer as a line of a command's output; empty if it would contradict what the user has decided.

    Args:
        options, pairs, texts: as for `choose_answer`.
        decided: the names of the options that the user has written himself, in place of a recipe.
        at_least: whether it has these pairs or more.
    """
    values = _words(answer, options or {}, decided, pairs)
    if not values:
        return ""
    if "captions_per_image" in values.keys() - set(decided):  # as many as the pairs have
        values["captions_per_image"] = f"{min(3, max(2, round(texts)))}"
    values |= _batch_and_epochs(values, options or {}, decided, None if at_least else pairs)
    is_written = all(name in decided and value == spelled((options or {}).get(name)) for name, value in values.items())
    words = " ".join(f"--{name} {value}".rstrip() for name, value in values.items())
    write = answer.write.partition("--")[0] + words  # torchrun stands before the first option
    have, gain, price = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for text in (answer.have, answer.gain, answer.price)
    )
    if pairs:
        have = re.sub(r"some [\d,]+(?: million)? pairs", f"{'at least ' * at_least}{pairs:,} pairs", have)
    measured = "Measured"
    if answer.figures:
        arrow = "before → after" if answer.figures == OLD_AND_NEW else "without → with"
        measured += f" with small CLIPs ({answer.figures}{f'; {arrow}' if '→' in gain else ''})"
    written = " you have written" if is_written else ""
    return f"For {have}{written}: {write}\n  {measured}: {gain}. Price: {price}. All answers: {PAGE}."


def _words(answer: Answer, options: Mapping[str, Any], decided: Collection[str], pairs: int | None) -> dict[str, str]:
    """The options to write, with the user's values; none if they would contradict these, or for next to no pairs."""
    values = dict(re.findall(r"--(\w+)(?: ((?!--).+?)(?= --|$))?", answer.write))
    recipe = values.get("recipe")
    has_other = recipe and (options.get("recipe") not in (None, recipe) or options.get("lora_rank"))
    if has_other or (pairs and pairs < LEAST) or (answer is ANSWERS["batch"] and not OF_BATCH.isdisjoint(decided)):
        return {}
    of_user = {name: options.get(name) for name in OF_USER if name in decided}
    of_user["samples_per_epoch"] = of_user.get("samples_per_epoch") or pairs
    of_user["guard_dataset"] = of_user.get("guard_dataset") or of_user.get("replay_dataset")
    for name, value in of_user.items():
        if value and name in values:
            values[name] = shlex.join(map(spelled, value if isinstance(value, list) else [value]))
    if "dataset" in decided and not options.get("streaming"):
        values = {name: value for name, value in values.items() if name not in ("streaming", "samples_per_epoch")}
    if "nproc_per_node" in values:
        values["nproc_per_node"] = values["nproc_per_node"].replace("8", str(options.get("gpus") or 8), 1)
    return values


def _batch_and_epochs(
    values: Mapping[str, str], options: Mapping[str, Any], decided: Collection[str], pairs: int | None
) -> dict[str, str]:
    """The batch and the epochs to write in place of those of an answer, whose options are ``values``, or of its recipe.

    1. The user's own batch and epochs stay, except for a batch larger than the set.
    2. Otherwise the batch is that of the answer or its recipe, and at most a quarter of the pairs. In the answer for
       random weights it is the one that leaves `BEST_STEPS`, among those that were measured.
    3. If the epochs leave too few steps, the batch gets smaller, down to the smallest that is advised; one that the
       user has written only if he has written the epochs, too.
    4. If the steps are still too few, the epochs get more, unless he has written them. From random weights they do not
       exceed those that were measured, if these suffice for a schedule.

    Rules 3 and 4 do not hold with ``max_steps``, and none but the first if the number of ``pairs`` is not known.
    """
    if values.keys().isdisjoint({"recipe", "global_batch_size"}):
        return {}
    own = None if OF_BATCH.isdisjoint(decided) else _batch(options)
    if pairs is None:
        return {"global_batch_size": str(own)} if own else {}
    if own and own > pairs:
        own = None
    asked = next((options[name] for name in ("epochs", "num_train_epochs") if name in decided), None)
    usual = {"num_train_epochs": options.get("num_train_epochs") or 3}
    if "recipe" in values:
        usual |= {name: value for name, (value, _) in options_in(RECIPES[values["recipe"]]).items()}
    usual |= {name: int(values[name]) for name in ("global_batch_size", "num_train_epochs") if name in values}
    usual_batch = usual.get("global_batch_size") or math.prod(usual[name] for name in DIVISION)
    epochs = asked or usual["num_train_epochs"]
    samples = pairs * (1 + ("replay_dataset" in values))  # of an epoch, since half of a batch is old
    from_random = _is_random(options) or not {"muon", "from_scratch"}.isdisjoint(values.values())
    steps = LEAST_STEPS if from_random and not (asked and own) else TOO_FEW_STEPS
    smallest = SMALL_MEASURED if from_random and not asked else SMALL_BATCH
    has_steps = "max_steps" in decided

    # ---- Rules 1 and 2 ----
    batch = own or usual_batch
    if not own and "optimizer" in values and not has_steps:
        best = max(batch_of_enough_steps(samples * epochs, BEST_STEPS), smallest)
        batch = min(best, _batch(options) or LARGE_MEASURED)  # the options have that of the user's recipe
    if not own:
        batch = min(batch, batch_of_enough_steps(pairs, 4))
    # ---- Rule 3 ----
    if (asked or not own) and not has_steps:
        batch = min(batch, max(batch_of_enough_steps(samples * epochs, steps), smallest))
    found = {"global_batch_size": str(batch)} if own or batch != usual_batch else {}
    # ---- Rule 4 ----
    least = math.ceil(steps * batch / samples)
    if from_random:
        least = max(min(least, MOST_EPOCHS), math.ceil(TOO_FEW_STEPS * batch / samples))
    if asked and "num_train_epochs" in values:
        found["num_train_epochs"] = spelled(asked)
    elif not asked and epochs < least and not has_steps:
        found["num_train_epochs"] = str(least)
    return found


def _batch(options: Mapping[str, Any]) -> int | None:
    return options.get("global_batch") or options.get("global_batch_size")
