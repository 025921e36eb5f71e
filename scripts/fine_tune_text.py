#!/usr/bin/env python3
r"""Fine-tune a text embedder on several captions of each thing, in exact batches of any size.

    python scripts/real_pairs.py --output_dir outputs/corpus --with_icons
    python scripts/fine_tune_text.py --model sentence-transformers/all-MiniLM-L6-v2 \
      --pairs outputs/corpus/icons/train.parquet

The first caption of a row is the document, the last one the query. One in twenty names is held out.
"""

import argparse

import datasets
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from hf_infcl import ExactContrastiveLoss

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--model", required=True, help="a folder or a Hub id")
parser.add_argument("--pairs", required=True, help="a parquet file with a column of lists of captions")
parser.add_argument("--caption_column", default="caption")
parser.add_argument("--output_dir", default="outputs/text-embedder")
parser.add_argument("--batch_size", type=int, default=2048, help="rows of a process that share one loss")
parser.add_argument("--learning_rate", type=float, default=2e-5)
parser.add_argument("--max_steps", type=int, default=100)
parser.add_argument("--use_cpu", action="store_true")
args = parser.parse_args()
captions = datasets.load_dataset("parquet", data_files=args.pairs, split="train")[args.caption_column]
others: dict[str, str] = {}  # by name: one query, so that no name is the document of two rows
for name, *rest in captions:
    if rest and rest[-1] != name:
        others.setdefault(name, rest[-1])
names = sorted(others)
held_out, trained = names[::20], [name for place, name in enumerate(names) if place % 20]
pairs = datasets.Dataset.from_dict({"query": [others[name] for name in trained], "document": trained})

model = SentenceTransformer(args.model, device="cpu" if args.use_cpu else None)
queries = {f"q{place}": others[name] for place, name in enumerate(held_out)}
documents = {f"d{place}": name for place, name in enumerate(held_out)}
relevant = {f"q{place}": {f"d{place}"} for place in range(len(held_out))}
evaluator = InformationRetrievalEvaluator(queries, documents, relevant, name="names", write_csv=False)
before = evaluator(model)

arguments = SentenceTransformerTrainingArguments(
    args.output_dir,
    per_device_train_batch_size=args.batch_size,
    learning_rate=args.learning_rate,
    max_steps=args.max_steps,
    use_cpu=args.use_cpu,
    report_to=[],
    logging_steps=10,
)
loss = ExactContrastiveLoss(model, retain_graphs="auto")
SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss).train()
model.save(args.output_dir)
after = evaluator(model)
for name in ("names_cosine_accuracy@1", "names_cosine_recall@10", "names_cosine_mrr@10"):
    print(f"{name}: {before[name]:.3f} before, {after[name]:.3f} after")
