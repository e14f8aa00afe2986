"""Recipes: every setting of a run, typed and explained. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from latte.errors import UserError

R = TypeVar("R")


@dataclass
class DataRecipe:
    """Where text comes from, how it is split, and how it becomes tokens."""

    source: str = "python-stdlib"
    """python-stdlib (the source code of the running Python's standard library), a file or folder (text, JSON lines or
    parquet, plain or .gz), or hf:NAME for a Hugging Face dataset."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What the files are; auto goes by their names."""
    text_field: str = "text"
    """Where the text stands in each JSON line, parquet row or dataset row."""
    separator: str | None = None
    """Cut text files into documents wherever this stands; otherwise each file is one document."""
    limit_bytes: int | None = None
    """Read no more than this much text."""
    hf_config: str | None = None
    """Configuration of the Hugging Face dataset."""
    hf_split: str = "train"
    """Split of the Hugging Face dataset."""
    valid_source: str | None = None
    """Text to validate on, of the same format; otherwise some documents of source are kept for it."""
    valid_fraction: float = 0.05
    """Part of the documents (with split tail, of the text) that is kept for validation."""
    split: Literal["document", "tail"] = "document"
    """document: each document is in one part, chosen by a hash of it; tail: the end of the text is for validation."""
    split_seed: int = 0
    """Another number, another choice of documents."""
    tokenizer: str = "bpe"
    """bpe (byte-level, trained on the training part), bytes, or any tokenizer of transformers by folder or name."""
    vocab_size: int = 4096
    """Entries of the bpe that is trained here."""
    sequence_length: int = 512
    """Tokens in a training row. Documents are packed into rows; nothing crosses from one into another."""
    cache: str | None = None
    """Folder of token files; the default is $LATTE_CACHE, or ~/.cache/latte."""

    def __post_init__(self) -> None:
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"data.valid_fraction is {self.valid_fraction}, expected a number between 0 and 1")
        if self.sequence_length < 2:
            raise UserError(f"data.sequence_length is {self.sequence_length}, expected at least 2")
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise UserError(f"data.limit_bytes is {self.limit_bytes}, expected at least 1")
        if self.separator == "":
            raise UserError("data.separator is empty, expected some text or nothing at all")
        if self.tokenizer == "bpe" and self.vocab_size < 257:
            raise UserError(
                f"data.vocab_size is {self.vocab_size}, expected at least 257: 256 bytes and the end of text"
            )


@dataclass
class ModelRecipe:
    """Which model to train."""

    variant: str = "latte-r-swa++"
    """latte, latte++, latte-conv++, latte-conv-swa++, latte-r++, latte-r-swa++, r-swa++ or transformer++."""
    size: str = "tiny"
    """tiny, small or paper-150m."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of LatteConfig or options of the mixer that differ from the size's, such as hidden_size or window."""
    pretrained: str | None = None
    """A model's folder or name on the hub to start from, instead of new weights; variant and size are then not used."""


@dataclass
class TrainRecipe:
    """How to train it."""

    steps: int = 1000
    """Optimiser steps."""
    batch_size: int = 16
    """Rows in a step, over all processes and accumulated parts: the same however many machines share the work."""
    micro_batch_size: int | None = None
    """Rows a process reads at once; smaller needs less memory. The default is its whole share of the batch."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises from 0 to its peak."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after its peak."""
    final_learning_rate_ratio: float = 0.1
    """What is left of the learning rate at the last step, as a part of its peak."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors (norms, biases, gates) have none."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean square."""
    epsilon: float = 1e-8
    """AdamW's guard against division by zero."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto is bfloat16 where a GPU has it, float32 otherwise."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Over several processes, each holds the whole model (ddp) or a part of it (fsdp)."""
    seed: int = 0
    """Of the weights, the order of rows and dropout."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 200
    """Steps between validations; 0 validates at the end only."""
    eval_rows: int = 64
    """Rows to validate on."""
    save_every: int = 200
    """Steps between checkpoints; 0 saves at the end only (and when asked to stop)."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep; with 2 or more a damaged one costs save_every steps, not the run."""

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_size": 1, "log_every": 1, "eval_rows": 1, "keep_checkpoints": 1}
        least |= dict.fromkeys(("warmup_steps", "eval_every", "save_every", "clip_norm", "weight_decay", "seed"), 0)
        for name, value in least.items():
            if getattr(self, name) < value:
                raise UserError(f"train.{name} is {getattr(self, name)}, expected at least {value}")
        if self.learning_rate <= 0:
            raise UserError(f"train.learning_rate is {self.learning_rate}, expected more than 0")
        if self.micro_batch_size is not None and not 1 <= self.micro_batch_size <= self.batch_size:
            raise UserError(f"train.micro_batch_size is {self.micro_batch_size}, expected 1 to {self.batch_size}")


@dataclass
class Recipe:
    """A training run, whole: the same recipe and seed give the same weights."""

    out: str = "runs/latest"
    """The run's folder: settings, tokenizer, checkpoints, metrics, final model. The same command goes on with it."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Text and tokens."""
    model: ModelRecipe = field(default_factory=ModelRecipe)
    """The model."""
    train: TrainRecipe = field(default_factory=TrainRecipe)
    """The training."""


@dataclass
class EvalRecipe:
    """What to evaluate, on what, at which lengths."""

    model: str = "runs/latest"
    """A run's folder, a model's folder, or a name on the hub."""
    source: str | None = None
    """Text to evaluate on, as data.source of a training recipe; the default is the run's own validation part."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What the files are; auto goes by their names."""
    text_field: str = "text"
    """Where the text stands in each JSON line, parquet row or dataset row."""
    separator: str | None = None
    """Cut text files into documents wherever this stands."""
    tokenizer: str | None = None
    """A tokenizer's folder or name; the default is the model's own."""
    contexts: list[int] = field(default_factory=list)
    """Context lengths; the default is a quarter of the training length to eight times it."""
    max_tokens: int = 100_000
    """How many tokens to read, at each length the same ones."""
    min_document_tokens: int = 0
    """Leave out shorter documents: only long ones tell something about long contexts."""
    join_documents: bool = False
    """Read all documents as one, one after another."""
    out: str | None = None
    """A JSON file for the figures."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise UserError(f"max_tokens is {self.max_tokens}, expected at least 2")


@dataclass
class GenerateRecipe:
    """What to read, and how to go on with it."""

    model: str = "runs/latest"
    """A run's folder, a model's folder, or a name on the hub."""
    prompt: str | None = None
    """Text to continue."""
    prompt_file: str | None = None
    """A file to continue, of any length; - is standard input."""
    load_state: str | None = None
    """Go on from what --save_state kept; a prompt is then read after it."""
    save_state: str | None = None
    """Keep what was read, before anything is written, in a folder of this name."""
    max_new_tokens: int = 200
    """How many tokens to write at most; 0 only reads."""
    temperature: float = 0.8
    """Below 1 prefers likely tokens; 0 always takes the likeliest."""
    top_k: int = 0
    """Choose among this many likeliest tokens; 0 among all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Leave out tokens less likely than this part of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that were written already less likely."""
    seed: int = 0
    """Of the choices."""
    stop_at_end: bool = True
    """Stop where the model ends its document."""
    chunk: int = 512
    """Tokens of the prompt read at once."""

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[int, int | None]]
        bounds = {"max_new_tokens": (0, None), "temperature": (0, None), "top_k": (0, None), "chunk": (1, None)}
        bounds |= {"top_p": (0, 1), "min_p": (0, 1)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                raise UserError(
                    f"{name} is {value}, expected at least {least}" + (f" and at most {most}" if most else "")
                )
        if self.top_p == 0:
            raise UserError("top_p is 0, expected more than 0 and at most 1")
        if self.repetition_penalty <= 0:
            raise UserError(f"repetition_penalty is {self.repetition_penalty}, expected more than 0")
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("both prompt and prompt_file were given, expected one of them")


@dataclass
class StageRecipe:
    """One stage of teaching an extended model."""

    steps: int = 0
    """Optimiser steps; 0 leaves the stage out."""
    sequence_length: int = 1024
    """Tokens in a row."""
    batch_size: int = 1
    """Rows in a step."""
    micro_batch_size: int | None = None
    """Rows a process reads at once; smaller needs less memory."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 10
    """Steps in which the learning rate rises from 0 to its peak."""
    final_learning_rate_ratio: float = 0.1
    """What is left of the learning rate at the last step, as a part of its peak."""
    weight_decay: float = 0.0
    """Decay of matrices."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 100
    """Steps between validations; 0 validates at the end only."""
    eval_rows: int = 4
    """Rows to validate on."""
    save_every: int = 50
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise UserError(f"steps of a stage is {self.steps}, expected at least 0")
        if self.sequence_length < 2:
            raise UserError(f"sequence_length of a stage is {self.sequence_length}, expected at least 2")

    def train_recipe(self, seed: int) -> TrainRecipe:
        """The same in the words of a training run."""
        shared = {entry.name: getattr(self, entry.name) for entry in fields(StageRecipe)}
        del shared["sequence_length"]
        return TrainRecipe(**{**shared, "steps": max(1, self.steps)}, seed=seed)


@dataclass
class DistilRecipe(StageRecipe):
    """A stage that teaches the whole model end to end."""

    divergence: float = 1.0
    """Weight of the divergence from the pretrained model's predictions on the same tokens."""
    next_token: float = 0.0
    """Weight of the next-token loss. Above 0 the model also learns the text itself, not only to be what it was."""
    lora_rank: int = 0
    """Also train the pretrained attention projections, by additions of this rank; 0 trains new weights only."""


@dataclass
class JudgeRecipe:
    """How an extended model is compared with the pretrained one."""

    contexts: list[int] = field(default_factory=lambda: [1024, 4096, 16384, 65536])
    """Context lengths for perplexity."""
    sources: list[str] = field(default_factory=list)
    """More texts to measure on, beside the validation part: files, as data.source."""
    source_contexts: list[int] | None = None
    """Context lengths for those; default: the same."""
    max_tokens: int = 65536
    """Tokens of each text, at each length the same ones."""
    join_documents: bool = False
    """Read all documents of a text as one, one after another."""
    original_up_to: int | None = None
    """Longest context for the pretrained model, whose cost grows with its square; default: twice what it was made for.
    """
    retrieval_contexts: list[int] = field(default_factory=lambda: [1024, 4096])
    """Context lengths in which a fact is hidden and asked for; empty leaves it out."""
    retrieval_trials: int = 4
    """Facts hidden at each depth."""
    decode_contexts: list[int] = field(default_factory=lambda: [1024, 65536])
    """Contexts at which time and memory of writing a token are measured; empty leaves it out."""
    decode_tokens: int = 32
    """Tokens written there."""


@dataclass
class ExtendRecipe:
    """A pretrained model, what its layers become, and how the new part is taught."""

    model: str = ""
    """The pretrained model: a folder, a name on the hub, a GGUF file, or smollm2-135m."""
    out: str = "extended"
    """Folder of the extended model; it appears when all is done. The run itself is in OUT-run beside it."""
    window: int = 128
    """Tokens before the present one that the pretrained attention still sees."""
    sinks: int = 4
    """First tokens of the document that stay in its sight."""
    latents: int = 16
    """Latents of each head, through which everything else is seen."""
    feed: Literal["x", "conv", "rglru"] = "conv"
    """What feeds the latents: the layer's input, a short convolution of it, or a gated recurrence over it."""
    coupled: bool = True
    """Window and latents share one softmax by their own scores; without it the window's share is learned alone."""
    opening: float | None = None
    """Weight that the latents start training with; default: what the pretrained attention gives to all that lies behind
    the window."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Text; data.tokenizer and data.sequence_length are not used, the model's own tokenizer and each stage's length
    are."""
    transfer: StageRecipe = field(default_factory=lambda: StageRecipe(steps=200))
    """First: every layer's output is fitted to the pretrained layer's on the same input."""
    distil: DistilRecipe = field(default_factory=lambda: DistilRecipe(steps=200, learning_rate=1e-3))
    """Then: the whole model's predictions are fitted to the pretrained model's, within its own context."""
    lengthen: DistilRecipe = field(
        default_factory=lambda: DistilRecipe(
            steps=0, sequence_length=8192, learning_rate=3e-4, divergence=0.0, next_token=1.0
        )
    )
    """Last: longer sequences, beyond what the pretrained model can read."""
    judge: JudgeRecipe = field(default_factory=JudgeRecipe)
    """The comparison at the end."""
    seed: int = 0
    """Of the new weights and the order of rows."""
    dry_run: bool = False
    """Only say what would be done: parameters, tokens, memory, time on this machine."""

    def __post_init__(self) -> None:
        for name, least in (("window", 0), ("sinks", 0), ("latents", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, expected at least {least}")
        if self.opening is not None and not 0 < self.opening < 1:
            raise UserError(f"opening is {self.opening}, expected a number between 0 and 1")
        if self.distil.lora_rank and self.lengthen.steps and self.lengthen.divergence:
            raise UserError(
                f"lengthen.divergence is {self.lengthen.divergence} after a stage with distil.lora_rank, expected 0: "
                "with its weights changed the model no longer holds its teacher"
            )


@dataclass
class CompareRecipe:
    """Several models, the same text, tokens and settings."""

    out: str = "runs/compare"
    """Folder of the comparison: a run's folder for each model, and the table and plots."""
    variants: list[str] = field(default_factory=lambda: ["latte-r-swa++", "transformer++"])
    """What to compare: variants, as in model.variant, or names of mixers, which then take attention's place in a
    transformer++."""
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of single ones by name, beside model.overrides, which all of them get where they have such a setting."""
    match_parameters: bool = False
    """Give each the MLP width that brings it nearest to the parameters of match."""
    match: str | None = None
    """Whose parameters to match; the default is the largest."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Text and tokens."""
    model: ModelRecipe = field(default_factory=ModelRecipe)
    """Size and overrides; its variant is not used."""
    train: TrainRecipe = field(default_factory=TrainRecipe)
    """The training, the same for all."""
    eval_tokens: int = 50_000
    """Validation tokens to score at each context length."""
    eval_contexts: list[int] = field(default_factory=list)
    """Context lengths; the default is a quarter of the training length to eight times it."""
    min_document_tokens: int = 0
    """Score only validation documents of at least this length."""
    join_documents: bool = False
    """Score all validation documents as one, one after another."""
    decode_context: int = 1024
    """Tokens before the ones whose speed of writing is measured."""
    decode_tokens: int = 32
    """How many tokens to write for it."""
    sample_prompt: str = ""
    """A prompt that each model continues, for the eye."""
    sample_tokens: int = 100
    """How many tokens of it; 0 for none."""
    isolate: bool = True
    """Train each model in a process of its own, so that the memory measured is its own."""

    def __post_init__(self) -> None:
        if len(self.variants) < 1 or len(set(self.variants)) != len(self.variants):
            raise UserError(f"variants are {self.variants}, expected different names, at least one")
        for name in [*self.overrides, *([] if self.match is None else [self.match])]:
            if name not in self.variants:
                raise UserError(f"{name!r} is set but not compared, expected one of {', '.join(self.variants)}")


#: What may differ when a run is resumed: none of it changes what is computed.
FREE = frozenset(
    {"out", "data.cache", "train.micro_batch_size", "train.strategy", "train.log_every", "train.eval_every"}
    | {"train.eval_rows", "train.save_every", "train.keep_checkpoints", "train.gradient_checkpointing"}
)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """A recipe as dotted names and plain values; dictionaries that users fill are values."""
    if not is_dataclass(value):
        return {prefix: value}
    result: dict[str, Any] = {}
    for entry in fields(value):
        result |= flatten(getattr(value, entry.name), f"{prefix}.{entry.name}" if prefix else entry.name)
    return result


def require_same(mine: dict[str, Any], recorded: dict[str, Any], where: str) -> None:
    """Hold a recipe to the one that a run folder was made with.

    Raises:
        UserError: it differs in something that changes the result.
    """
    differ = [name for name in sorted(mine.keys() | recorded.keys()) if mine.get(name) != recorded.get(name)]
    differ = [name for name in differ if name not in FREE]
    if differ:
        said = "; ".join(f"{name} was {recorded.get(name)!r}, now {mine.get(name)!r}" for name in differ[:3])
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise UserError(f"{where} belongs to another run ({said}{more}): give another --out, or the same settings")


def to_yaml(recipe: Any) -> str:
    """The recipe as YAML that a command takes as its --config."""
    import yaml

    return yaml.safe_dump(asdict(recipe), sort_keys=False, allow_unicode=True)


def from_yaml(kind: type[R], path: Path) -> R:
    """Read what :func:`to_yaml` wrote.

    Raises:
        UserError: there is no such file, or it is not such a recipe.
    """
    import yaml

    try:
        return _build(kind, yaml.safe_load(path.read_text(encoding="utf-8")) or {}, "")
    except OSError as error:
        raise UserError(f"there is no {path}") from error
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a recipe: {str(error).splitlines()[0]}") from error


def _build(kind: type[R], values: dict[str, Any], prefix: str) -> R:
    hints = get_type_hints(kind)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"unknown setting {prefix}{name}, expected one of {', '.join(hints)}")
        arguments[name] = _build(hints[name], value, f"{prefix}{name}.") if is_dataclass(hints[name]) else value
    return kind(**arguments)
