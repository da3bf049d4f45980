"""Writes a demo model's card from what its training measured. Knows words and numbers, never tensors."""

from dataclasses import dataclass

from models.measure import PROMPT, Agreement, Quality
from models.recipe import Recipe
from models.trainer import Outcome


@dataclass(frozen=True)
class Facts:
    """All that a card states about one model beyond its recipe."""

    parameters: int
    vocab: int
    texts: int
    train_tokens: int
    train_bytes: int
    heldout_bytes: int
    machine: str
    outcome: Outcome
    quality: Quality
    greedy_sample: str
    warm_sample: str


def card(recipe: Recipe, facts: Facts, agreement: Agreement | None, story: str) -> str:
    """The card as Markdown; `agreement` says how well a draft model drafts for the model named `story`."""
    parts = [_opening(recipe, facts, agreement, story), _figures(facts), _recipe(recipe, facts, story)]
    parts += [_samples(facts), _limits()]
    if agreement is not None:
        parts.insert(2, _agreement(agreement, story))
    return "\n\n".join(parts) + "\n"


def _opening(recipe: Recipe, facts: Facts, agreement: Agreement | None, story: str) -> str:
    shape = recipe.shape
    purpose = (
        "It is what a fresh checkout of Weft serves."
        if agreement is None
        else f"It shares the tokenizer of `{story}` and drafts tokens for it in speculative decoding."
    )
    return (
        f"---\nlanguage: en\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {recipe.name}\n\n"
        f"A small Llama-shaped model that goes on telling a story in English. {purpose}\n\n"
        f"{facts.parameters:,} parameters, tied embeddings included: {shape.layers} layers of width {shape.hidden}, "
        f"{shape.heads} query heads and {shape.kv_heads} key-value head{'s' * (shape.kv_heads > 1)} of width "
        f"{shape.head_dim}, SwiGLU of width {shape.intermediate}. Byte-level BPE of {facts.vocab:,} tokens, which "
        f"encodes any bytes. Context {recipe.window:,} tokens. `<|endoftext|>` begins and ends every text."
    )


def _figures(facts: Facts) -> str:
    quality = facts.quality
    return (
        "## Held-out figures\n\n"
        "Of the bf16 weights as they ship, over complete works that are in no training file "
        f"({facts.heldout_bytes:,} bytes), in windows side by side with nothing seen before each:\n\n"
        "| loss (nats a token) | perplexity | bits per byte |\n|---:|---:|---:|\n"
        f"| {quality.loss:.4f} | {quality.perplexity:.2f} | {quality.bits_per_byte:.4f} |\n\n"
        "The weights kept are those of the evaluation with the least held-out loss, of "
        f"{len(facts.outcome.heldout_losses)}: "
        + ", ".join(f"{loss:.3f}" for loss in facts.outcome.heldout_losses)
        + "."
    )


def _agreement(agreement: Agreement, story: str) -> str:
    return (
        "## As a draft model\n\n"
        f"On held-out text it finds the same next token likeliest as `{story}` at {agreement.greedy:.1%} of the "
        f"positions; a token it drafts at temperature 1 is accepted with probability {agreement.sampled:.1%}."
    )


def _recipe(recipe: Recipe, facts: Facts, story: str) -> str:
    goal = f"the distribution of `{story}`, its teacher" if recipe.distill else "the next token"
    outcome = facts.outcome
    return (
        "## Data and training\n\n"
        f"Public-domain English prose: children's stories, fairy tales, adventure and detective fiction first "
        f"published before 1929. {facts.train_bytes:,} bytes, cut at headings into {facts.texts:,} texts, "
        f"{facts.train_tokens:,} tokens. `models/CORPUS.md` lists the works.\n\n"
        f"Trained from scratch by `make train-demo CORPUS=folder` on {goal}: {recipe.epochs:g} epochs, "
        f"{outcome.steps:,} steps of {recipe.batch} windows of {recipe.window:,} tokens, Muon for the matrices and "
        f"AdamW for embeddings and norms, learning rate {recipe.learning_rate:g} with {recipe.warmup_steps} steps of "
        f"warm-up and a straight fall to zero over the last {recipe.decay_share:.0%}, weight decay "
        f"{recipe.matrix_weight_decay:g}, dropout {recipe.dropout:g}. "
        f"{outcome.tokens / 1e6:,.0f} M tokens in {outcome.seconds:.0f} s on {facts.machine}, "
        f"{outcome.tokens_per_second / 1e6:.2f} M tokens/s, evaluations included."
    )


def _samples(facts: Facts) -> str:
    return (
        f"## Samples\n\nAfter the prompt\n\n{_quote(PROMPT)}\n\nit goes on, decoding greedily:\n\n"
        f"{_quote(facts.greedy_sample)}\n\nand at temperature 0.7, top-p 0.95:\n\n{_quote(facts.warm_sample)}"
    )


def _limits() -> str:
    return (
        "## Limits\n\n"
        "It writes sentences, not plots: names and facts drift within a page, and greedy decoding falls into loops. "
        "It knows no instructions, no present-day world, no language but English and no arithmetic; its chat template "
        "only joins the messages as paragraphs and lets it tell the next one. It repeats phrases of its sources.\n\n"
        "The books are of their time. Passages with racial slurs were removed, but stereotypes of peoples, classes, "
        "women and the disabled remain, and the model can voice them. Use it to see Weft work, not to talk to "
        "anyone.\n\nAll works are in the public domain in the United States; the texts of authors who died after 1955 "
        "are still protected in countries that count the author's life and seventy years."
    )


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())
