"""Trains the demo models from a folder of stories: `python -m models.train --corpus FOLDER --out models`.

First the tokenizer, then the story model, then the draft model, which learns from the story model.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models import recipe as recipes
from models.card import Facts, card
from models.checkpoint import save_checkpoint
from models.corpus import Split, read_texts, tokenize
from models.measure import Agreement, agreement, continuation, quality
from models.network import build
from models.recipe import Recipe
from models.tokenizer import train_tokenizer
from models.trainer import Outcome, train


def main(argv: list[str] | None = None) -> None:
    """Read the command line, train both models and write a checkpoint and a card for each."""
    parser = argparse.ArgumentParser(prog="python -m models.train", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of train-*.txt.gz and heldout.txt.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder to write a checkpoint folder per model to")
    parser.add_argument("--tiny", action="store_true", help="train models of toy size, to see the program work")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    try:
        workshop = Workshop(options.corpus, options.tiny)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    workshop.make(options.out)


class Workshop:
    """A corpus read and tokenized once, and the two models made from it."""

    def __init__(self, corpus: Path, tiny: bool) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.story_recipe = recipes.TINY_STORY if tiny else recipes.STORY
        self.draft_recipe = recipes.TINY_DRAFT if tiny else recipes.DRAFT
        texts = read_texts(corpus, "train-*.txt.gz")
        self.text_count = len(texts)
        self.tokenizer: Tokenizer = train_tokenizer(texts, recipes.TINY_VOCAB if tiny else recipes.VOCAB)
        self.end_id = self.tokenizer.encode("").ids[0]
        self.texts = self._split(texts)
        self.heldout = self._split(read_texts(corpus, "heldout.txt.gz"))
        print(f"{len(self.texts):,} tokens to learn, {len(self.heldout):,} held out", flush=True)

    def make(self, out: Path) -> None:
        """Train the story model, then the draft model, and write both under `out`."""
        story = self._fresh(self.story_recipe)
        outcome = train(self.story_recipe, story, self.texts, self.heldout)
        self._ship(self.story_recipe, story, outcome, out, None)
        draft = self._fresh(self.draft_recipe)
        outcome = train(self.draft_recipe, draft, self.texts, self.heldout, teacher=story)
        draft.bfloat16()
        how_alike = agreement(draft, story, self.heldout, self.draft_recipe.window)
        self._ship(self.draft_recipe, draft, outcome, out, how_alike)

    def _split(self, texts: list[str]) -> Split:
        split = tokenize(texts, self.tokenizer).on(self.device)
        least = self.story_recipe.window * self.story_recipe.batch
        if len(split) < least:
            raise ValueError(f"the corpus is too small: {len(split)} tokens where {least} are needed")
        return split

    def _fresh(self, recipe: Recipe) -> LlamaForCausalLM:
        with self.device:
            return build(recipe.shape, self.tokenizer.get_vocab_size(), self.end_id)

    def _ship(
        self,
        recipe: Recipe,
        model: LlamaForCausalLM,
        outcome: Outcome,
        out: Path,
        how_alike: Agreement | None,
    ) -> None:
        """Round the model to bf16, measure it as rounded, write its checkpoint and card."""
        model.bfloat16()
        facts = Facts(
            parameters=sum(weight.numel() for weight in model.parameters()),
            vocab=self.tokenizer.get_vocab_size(),
            texts=self.text_count,
            train_tokens=len(self.texts),
            train_bytes=self.texts.text_bytes,
            heldout_bytes=self.heldout.text_bytes,
            machine=torch.cuda.get_device_name() if self.device.type == "cuda" else "a CPU",
            outcome=outcome,
            quality=quality(model, self.heldout, recipe.window),
            greedy_sample=continuation(model, self.tokenizer, temperature=0),
            warm_sample=continuation(model, self.tokenizer, temperature=0.7),
        )
        save_checkpoint(model, self.tokenizer, out / recipe.name)
        text = card(recipe, facts, how_alike, self.story_recipe.name)
        (out / recipe.name / "README.md").write_text(text, encoding="utf-8")
        print(
            f"{recipe.name}: perplexity {facts.quality.perplexity:.2f} as shipped\n{facts.warm_sample}",
            flush=True,
        )


if __name__ == "__main__":
    main()
